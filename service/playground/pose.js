/** The pose that can be turned: a slider for each of its dimensions, and the picture that the decoder makes of it. */

import { byId, element, enable, named, say } from "./dom.js";
import { paint } from "./pixels.js";

export const REACH = 0.25; // how far a dimension is moved, either way
const STEP = 0.01;
const SIZE = 224; // pixels of the drawing
const OPENING_CLASS = 3; // the class whose prototype is shown before anything is drawn

export class PosePanel {
  #model = null;
  #objects = []; // of the last answer
  #sliders = [];
  #changed;

  /** `changed(byHand)` is called when there is another pose to draw. */
  constructor(changed) {
    this.#changed = changed;
    byId("reset").addEventListener("click", () => this.reset());
    byId("as-label").addEventListener("change", () => this.#moved());
  }

  setModel(model) {
    this.#model = model;
    this.#sliders = this.names.map((name, dim) => this.#slider(name, dim));
    byId("sliders").replaceChildren(...this.#sliders.map(({ row }) => row));
    byId("open-sweep").disabled = byId("as-label").disabled = false;
    this.#objects = [];
    this.setObjects([]);
  }

  /** What each dimension does, if the manifest says so; those that do the same are told apart by their numbers. */
  get names() {
    const described = this.#model.manifest.dimensions.map(({ name }) => name);
    const isRepeated = (name) => described.indexOf(name) !== described.lastIndexOf(name);
    return Array.from({ length: this.#model.pose_size }, (_, dim) =>
      described[dim] ? `${described[dim]}${isRepeated(described[dim]) ? ` ${dim}` : ""}` : `dimension ${dim}`,
    );
  }

  /** Takes the objects of an answer; none for an empty slate, so that the model's own prototypes can be turned. */
  setObjects(objects, { isNew = true } = {}) {
    const chosen = isNew ? 0 : Math.max(0, objects.findIndex(({ label }) => label === this.object?.label)); // the longest comes first
    const asLabel = isNew || !this.#objects.length ? "" : byId("as-label").value;
    this.#objects = objects;
    this.#offerObjects(chosen);
    this.#offerLabels(asLabel);
    if (isNew) for (const slider of this.#sliders) slider.set(0);
    this.#show();
    this.#changed(false);
  }

  reset() {
    for (const slider of this.#sliders) slider.set(0);
    byId("as-label").value = this.#objects.length ? "" : this.#openingClass;
    this.#moved();
  }

  get object() {
    return this.#objects[this.index];
  }

  /** Which of the answer's objects is turned. */
  get index() {
    return Number(document.querySelector("#objects input:checked")?.value ?? 0);
  }

  /** The query for what is turned, without how far. */
  get subject() {
    const asLabel = byId("as-label").value;
    const subject = this.object ? [["pose", this.object.pose]] : [["label", asLabel]];
    if (this.object && asLabel) subject.push(["as_label", asLabel]);
    return [["model", this.#model.name], ...subject];
  }

  /** The whole query of GET /reconstruct. */
  get query() {
    const moved = this.#sliders.flatMap(({ input }, dim) =>
      Number(input.value) ? [["dim", dim], ["delta", input.value]] : [],
    );
    return [...this.subject, ...moved, ["size", SIZE]];
  }

  show(picture) {
    paint(byId("turned"), [picture]);
  }

  describe() {
    const asLabel = byId("as-label").value;
    if (!this.object) return `the model’s average ${asLabel}`;
    return `your ${this.object.label}${asLabel ? `, drawn as ${named(asLabel)}` : ""}`;
  }

  get #openingClass() {
    return this.#model.classes[OPENING_CLASS] ?? this.#model.classes[0];
  }

  #slider(name, dim) {
    const id = `dim-${dim}`;
    const input = element("input", { type: "range", id, min: -REACH, max: REACH, step: STEP, value: 0 });
    const figure = element("span", { class: "figure", "aria-hidden": "true" }); // the slider itself is read out
    const resetButton = element("button", { type: "button", class: "back", "aria-label": `Reset ${name}`, title: "Reset" }, "↺");
    const show = () => {
      const value = Number(input.value);
      say(figure, signed(value));
      input.setAttribute("aria-valuetext", signed(value));
      row.classList.toggle("moved", value !== 0);
      resetButton.disabled = value === 0;
    };
    const set = (value) => ((input.value = value), show());
    input.addEventListener("input", () => (show(), this.#moved()));
    let before = null; // its value when a finger came down, restored if the finger only scrolls
    input.addEventListener("pointerdown", ({ pointerType }) => (before = pointerType === "touch" ? input.value : null));
    input.addEventListener("pointercancel", () => before === null || (set(before), this.#moved()));
    resetButton.addEventListener("click", () => (set(0), input.focus(), this.#moved()));
    const row = element("div", { class: "slider" }, element("label", { for: id }, name), input, figure, resetButton);
    show();
    return { row, input, set };
  }

  #moved() {
    this.#show();
    this.#changed(true);
  }

  #show() {
    const moved = this.#sliders.some(({ input }) => Number(input.value));
    const as = byId("as-label").value;
    enable(byId("reset"), moved || as !== (this.#objects.length ? "" : this.#openingClass), byId("open-sweep"));
    const whose = this.describe();
    byId("turned").setAttribute("aria-label", `The pose of ${whose}${moved ? ", moved by the sliders" : ""}`);
    const suffix = moved ? ", moved" : "";
    say(byId("subject"), `This is ${whose}${suffix}.`);
  }

  #offerObjects(chosen) {
    const labels = this.#objects.length > 1 ? this.#objects.map(({ label }) => named(label)) : [];
    const present = [...byId("objects").querySelectorAll("label")];
    if (labels.join() !== present.map((each) => each.textContent).join()) { // otherwise one that has the focus would lose it
      for (const each of present) each.remove();
      byId("objects").append(...labels.map((label, index) => this.#radio(label, index)));
    }
    byId("objects").hidden = !labels.length;
    if (labels.length) byId("objects").querySelectorAll("input")[chosen].checked = true;
  }

  #radio(label, index) {
    const input = element("input", { type: "radio", name: "object", value: index });
    input.addEventListener("change", () => (this.#offerLabels(byId("as-label").value), this.#moved()));
    return element("label", { class: index ? "second" : "first" }, input, label);
  }

  #offerLabels(asLabel) {
    const seen = this.#objects.length ? [element("option", { value: "" }, `${this.object.label}, as seen`)] : [];
    const classes = this.#model.classes.map((label) => element("option", { value: label }, label));
    byId("as-label").replaceChildren(...seen, ...classes);
    byId("as-label").value = this.#objects.length ? asLabel : asLabel || this.#openingClass;
  }
}

/** A number with a sign and a true minus, so that figures below each other stay aligned. */
export function signed(value) {
  return value === 0 ? "0.00" : `${value > 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`;
}
