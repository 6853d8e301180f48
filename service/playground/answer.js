/** Shows an answer of /predict: the verdict in words, the lengths as bars, what was seen beside what is believed. */

import { announce, byId, element, named, say } from "./dom.js";
import { FIRST, SECOND, paint, paintDifference, read, wipe } from "./pixels.js";

const TILES = ["seen", "believed", "difference"];
const RARE = "1"; // key in `margins`: the lead that only this per cent of the network's own digits do not reach
const OBJECTS = ["first", "second"]; // their colours in style.css
const BELIEVED_HINT = byId("believed-hint").textContent;
const [DRAW_HINT, SEEN_HINT] = ["draw-hint", "seen-hint"].map((id) => byId(id).textContent); // for a model whose pictures have their ink found and boxed

/** The PNGs in an answer: what was seen, and what is believed of each object. */
export async function readPictures({ input, objects }) {
  const [seen, ...believed] = await Promise.all([input, ...objects.map(({ reconstruction }) => reconstruction)].map(read));
  return { seen, believed };
}

const seesSeveral = (model) => model?.manifest.max_objects > 1;
/** How two digits lie in a model's pictures. */
const arrangement = ({ image_shape: [, height, width] }) => (width >= 1.5 * height ? "side by side" : "one over the other");
const areDigits = (classes) => classes.every((label) => /^\d$/.test(label));

/** What to draw for a model; before one is known, what most models take. */
export function invitation(model) {
  const known = areDigits(model?.classes ?? []);
  if (seesSeveral(model)) return `Draw two ${known ? "different digits" : "of its classes"}, ${arrangement(model)}`;
  return known ? "Draw a digit" : "Draw one of its classes";
}

export class AnswerView {
  #bars = [];
  #model = null;

  setModel(model) {
    this.#model = model;
    this.#bars = model.classes.map((label) => {
      const bar = element("span", { class: "bar" }, element("span"));
      const figure = element("span", { class: "figure" });
      return { item: element("li", {}, element("span", { class: "label" }, label), bar, figure), bar: bar.firstChild, figure };
    });
    const { boxed } = model.manifest;
    say(byId("draw-hint"), boxed ? DRAW_HINT : "With mouse, finger or pen. Or drop or paste a picture, light on dark: it is only scaled.");
    say(byId("seen-hint"), boxed ? SEEN_HINT : "your drawing, scaled");
    byId("lengths").replaceChildren(...this.#bars.map(({ item }) => item));
    const { presence } = model.manifest.thresholds;
    byId("lengths").style.setProperty("--presence", presence);
    const mark = presence ? ` From the mark at ${presence.toFixed(2)} on, the class counts as there.` : "";
    say(byId("presence"), `A bar is a capsule’s length: how sure the network is that this class is there.${mark}`);
    this.clear();
  }

  clear(verdict = "Nothing yet", reason = `${invitation(this.#model)}, or pick ${seesSeveral(this.#model) ? "examples" : "an example"} below the slate.`) {
    this.#lengths([], []);
    if (byId("verdict").textContent !== verdict) announce(verdict);
    say(byId("verdict"), verdict);
    say(byId("glance"), "");
    say(byId("took"), "");
    say(byId("reason"), reason);
    byId("answer").dataset.verdict = "none";
    for (const id of TILES) wipe(byId(id));
    this.#captions("Nothing seen yet", "Nothing believed yet", "No difference yet", BELIEVED_HINT);
  }

  /** `isNew`: the picture is another than the last, so its answer is announced even if it is the same. */
  show(answer, seen, believed, isNew) {
    const { objects, probabilities } = answer;
    const labels = objects.map(({ label }) => label);
    byId("answer").dataset.verdict = answer.verdict;
    this.#lengths(probabilities, labels);
    const verdict = this.#verdict(answer.verdict, labels);
    if (isNew || byId("verdict").textContent !== verdict) announce(verdict);
    say(byId("verdict"), verdict);
    say(byId("glance"), verdict); // on a phone the answer may be below the edge
    say(byId("reason"), this.#reason(answer, labels));
    paint(byId("seen"), [seen]);
    paint(byId("believed"), believed, believed.length > 1 ? [FIRST, SECOND] : undefined);
    paintDifference(byId("difference"), seen, believed);
    const names = labels.map(named).join(" and ");
    const difference = `${seen.width}×${seen.height} pixels; mean squared difference ${answer.reconstruction_error.toFixed(3)}`;
    const hint = believed.length > 1 ? legend(labels) : BELIEVED_HINT;
    this.#captions("Your picture as the network took it", `What the network believes it saw: ${names}`, difference, hint);
  }

  #lengths(probabilities, labels) {
    this.#bars.forEach(({ item, bar, figure }, index) => {
      const length = probabilities[index] ?? 0;
      bar.style.transform = `scaleX(${length})`;
      say(figure, probabilities.length ? length.toFixed(2) : "");
      const place = labels.indexOf(this.#model.classes[index]);
      item.className = place < 0 ? "" : labels.length > 1 ? OBJECTS[place] : "winner";
    });
  }

  #verdict(verdict, labels) {
    const names = labels.map(named).join(" and ");
    if (verdict === "not_a_digit") return areDigits(this.#model.classes) ? "Not a digit" : "Nothing it knows";
    if (verdict === "unsure") return `Perhaps ${names}`;
    return labels.length > 1 ? capital(`${names}, ${arrangement(this.#model)}`) : `This is ${names}`;
  }

  #reason({ probabilities, verdict }, labels) {
    const lengthOf = (label) => probabilities[this.#model.classes.indexOf(label)];
    const lengthText = (label) => lengthOf(label).toFixed(2);
    const [first, last] = [labels[0], labels.at(-1)];
    const others = this.#model.classes.filter((label) => !labels.includes(label));
    const next = others.reduce((best, label) => (lengthOf(label) > lengthOf(best) ? label : best), others[0] ?? first);
    if (verdict === "not_a_digit") {
      const { presence, margins } = this.#model.manifest.thresholds;
      let reason = `Nearest is ${named(first)}, its capsule ${lengthText(first)} long; but what the network believes is not what it saw.`;
      if (lengthOf(first) < presence) reason = `Nearest is ${named(first)}, but its capsule is only ${lengthText(first)} long.`;
      else if (lengthOf(last) - lengthOf(next) < (margins[RARE] ?? 0)) {
        reason = `Nearest is ${named(first)}; but capsule ${last}, ${lengthText(last)} long, is hardly longer than the next, ${next}, ${lengthText(next)}.`;
      }
      return seesSeveral(this.#model) ? reason : `${reason} It reads one ${areDigits(this.#model.classes) ? "digit" : "thing"} at a time.`;
    }
    const winners = labels.map((label) => `capsule ${label} is ${lengthText(label)} long`).join(", ");
    const doubt = verdict === "unsure" ? " That is unusual for a clear picture." : "";
    const pair = labels.length > 1 ? " It was trained on two in every picture, and may find a second where there is only one." : "";
    return `${capital(winners)}; the next, ${next}, ${lengthText(next)}.${doubt}${pair}`;
  }

  #captions(seen, believed, difference, hint) {
    byId("seen").setAttribute("aria-label", seen);
    byId("believed").setAttribute("aria-label", believed);
    byId("difference").setAttribute("aria-label", difference);
    if (typeof hint === "string") say(byId("believed-hint"), hint);
    else byId("believed-hint").replaceChildren(...hint);
  }
}

/** Says which of two digits has which colour. */
function legend(labels) {
  return labels.map((label, index) => element("span", {}, element("i", { class: `key ${OBJECTS[index]}` }), named(label)));
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
