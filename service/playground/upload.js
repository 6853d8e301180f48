/** Pictures from outside: chosen, dropped or pasted. Calls `take(image, blob, name, file)`; image is null if the browser cannot show
 *  it, `file` is what a command can send: { name, note }. Whatever else there is to say goes to `remark(sentence)`.
 *  Returns a function to call when something newer takes the place of a picture that is still being read. */

import { PATIENCE, blobOf, sheetOf } from "./dom.js";

const LARGE = 1 << 20; // bytes; a larger photo is scaled down here, since the network looks at so few of its pixels
const MOST_BYTES = (10 << 20) + 1; // bytes; by default the service takes one less, and says so
const [MOST_PIXELS, LONGEST] = [25_000_000, 20_000]; // the service's limits on a picture's area and sides
const SIDE = 1600;
const READ_TYPES = ["image/png", "image/jpeg", "image/webp", "image/bmp"]; // by the service; others are converted to JPEG here

export function acceptPictures({ input, slate, take, remark }) {
  let newest = null;

  async function offer(files, pasted = false) {
    const [file] = files ?? [];
    if (!file) return;
    const [count, name] = [files.length, file.name || "picture.png"];
    newest = file;
    const slow = setTimeout(() => newest === file && remark(`Reading ${name} …`), PATIENCE);
    try {
      const { image, blob, as } = await prepared(file);
      if (newest !== file) return;
      take(image, blob, name, commandFile(name, as, pasted));
      if (count > 1) remark(`Of these ${count} files, only the first, ${name}, is on the slate: it holds one.`);
    } catch {
      if (newest === file) remark(`${name} cannot be read; is it a folder, or gone? Choose another.`);
    } finally {
      clearTimeout(slow);
    }
  }

  input.addEventListener("change", () => {
    offer(input.files);
    input.value = ""; // so that the same file can be chosen again
  });
  document.addEventListener("paste", (event) => {
    if (event.target.matches?.("[type=number], [type=password]")) return; // a spreadsheet's cell is pasted as both text and picture
    if (event.clipboardData?.files.length) event.preventDefault();
    offer(event.clipboardData?.files, true);
  });
  for (const over of ["dragenter", "dragover"]) {
    document.addEventListener(over, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      slate.classList.add("wanted");
    });
  }
  document.addEventListener("dragleave", (event) => event.relatedTarget || slate.classList.remove("wanted"));
  document.addEventListener("drop", (event) => {
    slate.classList.remove("wanted");
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    offer(event.dataTransfer.files);
  });
  return () => (newest = null);
}

/** The file that a command names, and what the user has to do before it exists. */
function commandFile(name, as, pasted) {
  if (as?.needed) {
    const jpeg = `${name.replace(/\.\w*$/, "")}${as.scaled && "-small"}.jpg`;
    return { name: jpeg, note: `The service was sent this as a JPEG${as.scaled}: first save that as ${jpeg}.` };
  }
  const first = pasted ? `This was pasted: save it as ${name} first.` : "";
  return { name, note: as ? `${first} This page sent it as a JPEG${as.scaled}.`.trim() : first };
}

/** The picture to show, the blob to send and, if that is not the file itself, `as`: whether the service would refuse the file, and the
 *  size if it is another. */
async function prepared(file) {
  const whole = await createImageBitmap(file).catch(() => null);
  if (!whole) return { image: null, blob: await copied(file) };
  const { width, height } = whole; // a closed bitmap has none
  const image = await scaledDown(whole).catch(() => null); // if memory is short, or the browser cannot scale
  if (!image) return { image, blob: await copied(file) };
  const large = width * height > MOST_PIXELS || Math.max(width, height) > LONGEST;
  if (READ_TYPES.includes(file.type) && file.size <= LARGE && !large) return { image, blob: await copied(file) };
  const sheet = sheetOf(image.width, image.height);
  const context = sheet.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency, and ink on transparent ground is mostly dark
  context.fillRect(0, 0, sheet.width, sheet.height);
  context.drawImage(image, 0, 0);
  const as = {
    needed: !READ_TYPES.includes(file.type) || file.size >= MOST_BYTES || large,
    scaled: image.width < width ? ` of ${image.width}x${image.height} pixels` : "",
  };
  return { image, blob: await blobOf(sheet, "image/jpeg", 0.92), as };
}

/** Scales a picture down: undo remembers pictures, so none may take a hundred megabytes. */
async function scaledDown(image) {
  const scale = SIDE / Math.max(image.width, image.height);
  if (scale >= 1) return image;
  const [resizeWidth, resizeHeight] = [image.width, image.height].map((side) => Math.max(1, Math.round(side * scale)));
  const smaller = await createImageBitmap(image, { resizeWidth, resizeHeight, resizeQuality: "high" });
  image.close();
  return smaller;
}

/** Reads the bytes, since a file may change or go before it is sent. If the service does not read its type, the beginning is enough
 *  for the service to say what it is. What is no picture goes as plain bytes: JSON would be read as a request. */
async function copied(file) {
  const type = file.type.startsWith("image/") ? file.type : "application/octet-stream";
  return new Blob([await file.slice(0, READ_TYPES.includes(type) ? MOST_BYTES : LARGE).arrayBuffer()], { type });
}
