/** Reads pictures by means of a canvas, and paints them onto others in the slate's colours. */

import { sheetOf } from "./dom.js";

const sheet = sheetOf(1, 1).getContext("2d", { willReadFrequently: true }); // for all reading
const SLATE = [17, 21, 28];
const CHALK = [247, 244, 236];
export const FIRST = [255, 178, 90]; // of two digits on top of each other
export const SECOND = [92, 188, 255];
const MISSING = [255, 134, 205]; // in the picture, but not in what is believed
const ADDED = [118, 226, 160];

/** A PNG, as blob or data URI -> ImageData. */
export async function read(png) {
  const bitmap = await createImageBitmap(typeof png === "string" ? unpacked(png) : png);
  const { width, height } = bitmap;
  Object.assign(sheet.canvas, { width, height }); // which clears it
  sheet.drawImage(bitmap, 0, 0);
  bitmap.close();
  return sheet.getImageData(0, 0, width, height);
}

/** A PNG as an <img> that can be shown at once; whoever takes it off the page must call its `forget`. */
export async function loadImage(png) {
  const picture = new Image();
  picture.src = URL.createObjectURL(png);
  picture.forget = () => URL.revokeObjectURL(picture.src);
  await picture.decode();
  return picture;
}

/** Unpacks a data: URI here instead of fetching it, so that the page's policy need not allow that. */
function unpacked(uri) {
  return new Blob([Uint8Array.from(atob(uri.slice(uri.indexOf(",") + 1)), (letter) => letter.charCodeAt(0))]);
}

/** Paints one picture as it is, with chalk for white, or several of one size over each other, each in one of `colours`. */
export function paint(canvas, pictures, colours) {
  const [{ width, height, data }] = pictures;
  if (!colours) return paintMixed(canvas, width, height, (i, channel) => [[data[4 * i + channel] / 255, CHALK]]);
  const grey = ({ data }, i) => (data[4 * i] + data[4 * i + 1] + data[4 * i + 2]) / 765;
  paintMixed(canvas, width, height, (i) => pictures.map((picture, index) => [grey(picture, i), colours[index]]));
}

/** Paints what is in the picture but not in what is believed, and the reverse, each in its colour. All are of one size. */
export function paintDifference(canvas, picture, believed) {
  paintMixed(canvas, picture.width, picture.height, (i) => [4 * i, 4 * i + 1, 4 * i + 2].map((at) => {
    const difference = picture.data[at] - Math.min(255, believed.reduce((sum, { data }) => sum + data[at], 0));
    return [Math.abs(difference) / 765, difference > 0 ? MISSING : ADDED];
  }));
}

export function wipe(canvas) {
  canvas.width = canvas.width; // according to the standard this clears it
}

/** Paints each pixel as the slate with light of some colours on it. */
function paintMixed(canvas, width, height, lights) {
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let channel = 0; channel < 3; channel++) {
      const added = lights(i, channel).reduce((sum, [level, colour]) => sum + level * (colour[channel] - SLATE[channel]), 0);
      image.data[4 * i + channel] = SLATE[channel] + added; // clamped by the array itself
    }
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}
