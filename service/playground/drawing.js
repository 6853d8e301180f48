/** What is on the slate: strokes and pictures, with undo. Knows no service; dispatches `change` when there is something new to see. */

import { blobOf, sheetOf } from "./dom.js";

const INK = 0.085; // width of a stroke, as a fraction of the slate's shorter side
const SENT_SIDE = 224; // pixels of that side in the picture that is sent
const SHIFT = 0.07; // fraction of that side by which two overlaid pictures are each moved apart
const REMEMBERED = 100; // steps of undo
const PHOTOGRAPHS = 5; // steps of those with pictures of the user's, which take megabytes each
const PALM = 1000; // milliseconds after a pen's last event in which a touch counts as the hand that holds it
const [REST, STILL] = [300, 0.03]; // milliseconds, fraction of that side: a touch that moves less in a longer time is a resting hand
const NOTHING = { pictures: [], strokes: [] };

export class Drawing extends EventTarget {
  #canvas;
  #aspect = 1; // width of the slate divided by its height
  #sheet = NOTHING; // replaced and never changed, so that undo can go back to it
  #undoStack = [];
  #stroke = null; // the one that is being drawn
  #pointer = null;
  #byTouch = false; // that stroke is a finger's, or a palm's
  #strokeStart = 0; // when that stroke began
  #lastPen = -Infinity; // when a pen was last seen

  constructor(canvas) {
    super();
    this.#canvas = canvas;
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#extend(event));
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) canvas.addEventListener(end, (event) => this.#end(event));
    new ResizeObserver(() => this.#render()).observe(canvas);
  }

  /** Gives the slate the shape of a model's pictures. */
  set aspect(aspect) {
    this.#aspect = aspect;
    this.#canvas.parentElement.style.setProperty("--aspect", aspect);
    this.#render();
  }

  get empty() {
    return !this.#sheet.pictures.length && !this.#sheet.strokes.length;
  }

  get undoable() {
    return this.#undoStack.length > 0;
  }

  /** The name of a file that is on the slate. */
  get file() {
    return this.#foreign?.name ?? "";
  }

  /** The name of a file that is on the slate but cannot be shown. */
  get hiddenFile() {
    return this.#foreign?.image ? "" : this.file;
  }

  /** Describes the slate to those who cannot see it. */
  describe() {
    const { pictures, strokes } = this.#sheet;
    if (this.#foreign) return `the picture ${this.#foreign.name}`;
    const parts = pictures.map(({ name }) => `example ${name}`);
    if (strokes.length) parts.push(strokes.length === 1 ? "1 stroke" : `${strokes.length} strokes`);
    return parts.join(", ") || "empty";
  }

  /** What outlives the page, as plain data: a sheet of strokes and of examples made of strokes, but not one with a picture. */
  get kept() {
    return this.#sheet.pictures.every((each) => each.strokes) ? this.#sheet : NOTHING;
  }

  restore(kept) {
    this.#show(kept);
  }

  undo() {
    this.#endStroke();
    this.#show(this.#undoStack.pop() ?? NOTHING);
  }

  clear() {
    if (!this.empty) this.#replace(NOTHING);
  }

  /** Takes a picture of the user's, sent unchanged until something is drawn over it. `image` is null if it cannot be shown. */
  put(image, blob, name, file) {
    this.#replace({ pictures: [{ image, blob, name, file, foreign: true }], strokes: [] });
  }

  /** Takes an example, { name, image } or { name, strokes }: in chalk, so more may be drawn; `over` lays it over one that is there. */
  place(example, over) {
    const kept = over && !this.#foreign ? this.#sheet : NOTHING;
    const below = kept.pictures.slice(-1);
    const shift = Math.max(SHIFT, (this.#aspect - 1) / 2); // beside each other where there is room
    const pictures = [...below.map((each) => ({ ...each, shift: -shift })), { ...example, shift: below.length ? shift : 0 }];
    this.#replace({ pictures, strokes: below.length ? [] : kept.strokes }); // two at most: strokes beside the first are removed
  }

  /** The { blob, name, note } to send; the name is that of a file that the user has, or gets by doing what the note says. */
  async picture() {
    if (this.#foreign) return { blob: this.#foreign.blob, ...this.#foreign.file };
    const [width, height] = [this.#aspect, 1 / this.#aspect].map((sides) => Math.round(SENT_SIDE * Math.max(1, sides)));
    const sheet = sheetOf(width, height);
    render(sheet.getContext("2d"), "white", "black", this.#sheet);
    return { blob: await blobOf(sheet, "image/png") };
  }

  get #foreign() {
    return this.#sheet.pictures.find((each) => each.foreign);
  }

  #begin(event) {
    const [touches, pens] = [event.pointerType === "touch", event.pointerType === "pen"];
    if (touches && event.timeStamp - this.#lastPen < PALM) return;
    if (pens) this.#lastPen = event.timeStamp;
    if (this.#byTouch && (pens || this.#rests(event))) this.undo();
    if (this.#pointer !== null || event.button > 0) return;
    event.preventDefault();
    // A stroke over a photograph would not be visible, so it begins a new sheet.
    const kept = this.#foreign ? NOTHING : this.#sheet;
    const stroke = [this.#point(event)];
    this.#replace({ pictures: kept.pictures, strokes: [...kept.strokes, stroke] }, true);
    this.#stroke = stroke;
    this.#pointer = event.pointerId;
    this.#byTouch = touches;
    this.#strokeStart = event.timeStamp;
    this.#canvas.setPointerCapture(event.pointerId);
  }

  #extend(event) {
    if (event.pointerType === "pen") this.#lastPen = event.timeStamp;
    if (event.pointerId !== this.#pointer) return;
    if (!event.buttons) return this.#end(event); // it was lifted without an event to tell
    const events = event.getCoalescedEvents?.() ?? [];
    this.#stroke.push(...(events.length ? events : [event]).map((each) => this.#point(each)));
    this.#show(this.#sheet, true);
  }

  #end(event) {
    if (event.pointerType === "pen") this.#lastPen = event.timeStamp;
    if (event.pointerId !== this.#pointer) return;
    if (event.type === "pointercancel" && this.#byTouch) return this.undo(); // the system says it was a palm or a gesture
    this.#endStroke();
    this.#show(this.#sheet);
  }

  /** Whether the touch that draws has rested in its place until now. */
  #rests({ timeStamp }) {
    const [[startX, startY]] = this.#stroke;
    return timeStamp - this.#strokeStart > REST && this.#stroke.every(([x, y]) => Math.hypot(x - startX, y - startY) < STILL);
  }

  /** Ends the stroke under way, whatever its pointer still does. */
  #endStroke() {
    this.#pointer = this.#stroke = null;
    this.#byTouch = false;
  }

  /** A point in fractions of the square in the slate's middle, so that a drawing survives turning the phone. */
  #point(event) {
    const { left, top, width, height } = this.#canvas.getBoundingClientRect();
    const side = Math.min(width, height);
    return [(event.clientX - left - (width - side) / 2) / side, (event.clientY - top - (height - side) / 2) / side];
  }

  #replace(sheet, drawing) {
    this.#endStroke();
    this.#undoStack = remembered([...this.#undoStack, this.#sheet]);
    this.#show(sheet, drawing);
  }

  /** `drawing`: the pen is still down. `isNew`: this is another drawing than before, not more of it. */
  #show(sheet, drawing = false) {
    const isNew = this.empty || sheet.pictures !== this.#sheet.pictures;
    this.#sheet = sheet;
    this.#render();
    this.dispatchEvent(new CustomEvent("change", { detail: { drawing, isNew } }));
  }

  #render() {
    const { clientWidth, clientHeight } = this.#canvas;
    const [width, height] = [clientWidth, clientHeight].map((length) => Math.max(1, Math.round(length * devicePixelRatio)));
    Object.assign(this.#canvas, { width, height });
    const { color, backgroundColor } = getComputedStyle(this.#canvas);
    render(this.#canvas.getContext("2d"), color, backgroundColor, this.#sheet);
  }
}

function remembered(sheets) {
  const photographs = sheets.flatMap(({ pictures }, at) => (pictures.some(({ foreign }) => foreign) ? [at] : []));
  return sheets.slice(Math.max(sheets.length - REMEMBERED, 1 + (photographs.at(-PHOTOGRAPHS - 1) ?? -1)));
}

/** Draws an example on a canvas of its own. */
export function sketch(canvas, example) {
  const { color, backgroundColor } = getComputedStyle(canvas);
  render(canvas.getContext("2d"), color, backgroundColor, { pictures: [example], strokes: [] });
}

function render(context, chalk, slate, sheet) {
  const { width, height } = context.canvas;
  const side = Math.min(width, height);
  context.fillStyle = slate;
  context.fillRect(0, 0, width, height);
  context.translate((width - side) / 2, (height - side) / 2); // to the square in the middle of the canvas
  Object.assign(context, { strokeStyle: chalk, lineWidth: INK * side, lineCap: "round", lineJoin: "round" });
  for (const { image, strokes = [], shift = 0, foreign } of sheet.pictures) {
    write(context, side, strokes, shift);
    if (!image) continue;
    const scale = Math.min(width / image.width, height / image.height);
    const [across, down] = [image.width * scale, image.height * scale];
    const place = [(side - across) / 2 + shift * side, (side - down) / 2, across, down];
    if (foreign) {
      context.fillStyle = "#999"; // behind what is transparent: black and white ink are both visible on it
      context.fillRect(...place);
    } else {
      context.globalCompositeOperation = "lighten"; // so that two examples both stay visible
    }
    context.drawImage(image, ...place);
    context.globalCompositeOperation = "source-over";
  }
  write(context, side, sheet.strokes, 0);
  context.resetTransform();
}

function write(context, side, strokes, shift) {
  for (const stroke of strokes) trace(context, stroke.map(([x, y]) => [(x + shift) * side, y * side]));
}

/** Draws a smooth line whose curves meet halfway between points. */
function trace(context, points) {
  const [[x, y]] = points;
  context.beginPath();
  context.moveTo(x, y);
  points.slice(1, -1).forEach(([atX, atY], index) => {
    const [nextX, nextY] = points[index + 2];
    context.quadraticCurveTo(atX, atY, (atX + nextX) / 2, (atY + nextY) / 2);
  });
  const [endX, endY] = points.at(-1);
  context.lineTo(endX + 0.01, endY); // a line without length, as of a dot, would not be drawn
  context.stroke();
}
