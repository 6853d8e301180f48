/** Examples to begin with: digits as a pen writes them; for other classes each one's prototype, as the model draws it. */

import { strokesOf } from "./digits.js";
import { byId, element } from "./dom.js";
import { sketch } from "./drawing.js";

const SIDE = 112; // pixels

export class Examples {
  #draw;
  #place;
  #showRefusal;

  /** `draw(parameters)` gives a picture as a blob, `place(example, model)` puts one on the slate, `showRefusal(error)` says why one is missing. */
  constructor({ draw, place, showRefusal }) {
    this.#draw = draw;
    this.#place = place;
    this.#showRefusal = showRefusal;
  }

  /** Makes a button for each class, enabled as soon as there is something on it. */
  show(model) {
    const buttons = model.classes.map((label) => {
      const canvas = element("canvas", { width: SIDE, height: SIDE, "aria-hidden": "true" });
      const name = strokesOf(label, model.classes) ? [] : [element("span", {}, label)]; // the drawing may not be recognisable
      return element("button", { type: "button", "aria-label": `Example ${label}`, title: label, disabled: true }, canvas, ...name);
    });
    byId("examples").replaceChildren(...buttons);
    buttons.forEach((button, index) => this.#fill(button, model, model.classes[index]));
  }

  /** Fills a button when its picture is there; if one fails, the others stay. */
  async #fill(button, model, label) {
    try {
      const strokes = strokesOf(label, model.classes);
      const example = strokes ? { name: label, strokes } : { name: label, image: await this.#prototype(model, label) };
      if (!button.isConnected) return; // the buttons are another model's by now
      button.disabled = false; // before drawing, or in forced colours it would look disabled
      sketch(button.firstChild, example);
      button.addEventListener("click", () => this.#place(example, model));
    } catch (error) {
      if (!button.isConnected) return;
      button.remove();
      this.#showRefusal(error);
    }
  }

  async #prototype(model, label) {
    return createImageBitmap(await this.#draw([["model", model.name], ["label", label], ["size", SIDE]]));
  }
}
