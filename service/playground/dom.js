/** The few words that the other modules need to speak to the page. */

export const PATIENCE = 250; // milliseconds after which waiting is shown

export const byId = (id) => document.getElementById(id);

/** element("li", { class: "bar" }, "text", child) */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Not an OffscreenCanvas, which tablets in classrooms lack. */
export function sheetOf(width, height) {
  return Object.assign(document.createElement("canvas"), { width, height });
}

/** What is on a canvas as a file, `type` and perhaps `quality` being toBlob's. */
export function blobOf(canvas, ...how) {
  return new Promise((resolve) => canvas.toBlob(resolve, ...how));
}

/** Whether a button can be used; where it cannot any more and has the focus, that goes to `heir` and not to nowhere. */
export function enable(button, possible, heir) {
  const focused = document.activeElement === button;
  button.disabled = !possible;
  if (focused && !possible) heir.focus();
}

/** Sets text only where it changes, so that a screen reader does not read out what it has read already. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** What a screen reader reads out, the same words again too: a new node is news. What is to be seen stands elsewhere. */
export function announce(words) {
  byId("announcement").replaceChildren(element("span", {}, words));
}

/** A class in a sentence: digits take an article, names such as `Sneaker` stand alone. */
export function named(label) {
  return /^\d$/.test(label) ? `${label === "8" ? "an" : "a"} ${label}` : label;
}
