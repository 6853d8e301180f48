/** Two digits that were kept, and the strip of poses between them. */

import { announce, byId, element, enable, named, say } from "./dom.js";
import { paint, wipe } from "./pixels.js";

const ENDS = ["from", "to"];
const EXPLANATION = byId("morph-hint");
const INITIAL_EXPLANATION = EXPLANATION.textContent;

export class MorphPanel {
  #kept = {};
  #current = null;
  #changed;
  #strip = null;

  /** `changed()` is called when there is another strip to draw. */
  constructor(changed) {
    this.#changed = changed;
    for (const end of ENDS) byId(`keep-${end}`).addEventListener("click", () => this.#keep(end));
    // A wrong number is not reported here: the focus would return from whatever was clicked, and the click would be lost.
    byId("steps").addEventListener("change", () => byId("steps").checkValidity() && this.complete && this.#changed());
  }

  /** Forgets what was kept: poses of another model mean nothing to this one. */
  setModel() {
    this.#kept = {};
    say(EXPLANATION, INITIAL_EXPLANATION);
    this.#show(EXPLANATION);
    for (const end of ENDS) {
      wipe(byId(end));
      byId(end).classList.add("blank");
      byId(end).setAttribute("aria-label", end === "from" ? "No start yet" : "No end yet");
    }
    this.offer(null);
  }

  /** What a click would keep: an object of the last answer and its picture, or nothing. */
  offer(object, picture) {
    this.#current = object && { ...object, picture };
    for (const end of ENDS) enable(byId(`keep-${end}`), object, byId("file"));
  }

  get complete() {
    return ENDS.every((end) => this.#kept[end]);
  }

  get query() {
    return [...ENDS.map((end) => [end, this.#kept[end].pose]), ["steps", byId("steps").valueAsNumber]];
  }

  /** The strip that `query` asks for. */
  describe() {
    const [start, end] = ENDS.map((each) => named(this.#kept[each].label));
    return `${byId("steps").valueAsNumber} drawings from ${start} to ${end}`;
  }

  /** `description` is what `describe` returned when the strip was asked for. */
  show(picture, description) {
    picture.alt = description;
    this.#show(element("div", { class: "plate" }, picture));
    this.#strip = picture;
    announce(description);
  }

  #keep(end) {
    this.#kept[end] = this.#current;
    paint(byId(end), [this.#current.picture]);
    byId(end).classList.remove("blank");
    byId(end).setAttribute("aria-label", `${end === "from" ? "Start" : "End"}: ${named(this.#current.label)}`);
    if (!this.complete) {
      say(EXPLANATION, `Kept. Now draw another and keep it as the ${end === "from" ? "end" : "start"}.`);
      announce(EXPLANATION.textContent);
    } else {
      say(EXPLANATION, "Both are kept; the poses between them appear here.");
      if (byId("steps").reportValidity()) this.#changed();
    }
  }

  #show(child) {
    this.#strip?.forget();
    this.#strip = null;
    byId("strip").replaceChildren(child);
  }
}
