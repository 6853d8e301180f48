/** What the other modules need to work with the page. */

export const PATIENCE = 250; // milliseconds after which waiting is shown

export const byId = (id) => document.getElementById(id);

/** element("li", { class: "bar" }, "text", child) */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A canvas of its own; not an OffscreenCanvas, which tablets in classrooms lack. */
export function sheetOf(width, height) {
  return Object.assign(document.createElement("canvas"), { width, height });
}

/** The content of a canvas as a file; `options` is toBlob's `type` and perhaps `quality`. */
export function blobOf(canvas, ...options) {
  return new Promise((resolve) => canvas.toBlob(resolve, ...options));
}

/** Enables or disables a button; if it has the focus when it is disabled, that goes to `heir` and is not lost. */
export function enable(button, possible, heir) {
  const focused = document.activeElement === button;
  button.disabled = !possible;
  if (focused && !possible) heir.focus();
}

/** Sets text only where it changes, so that a screen reader does not read out what it has read already. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes a screen reader read out words, even the same as before, since a new node is a change. They are not visible. */
export function announce(words) {
  byId("announcement").replaceChildren(element("span", {}, words));
}

/** A class in a sentence: digits take an article, names such as `Sneaker` stand alone. */
export function named(label) {
  return /^\d$/.test(label) ? `${label === "8" ? "an" : "a"} ${label}` : label;
}
