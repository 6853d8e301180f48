/** The sheet of the paper's Figure 4 in a dialog: a row for each dimension of the pose, a column for each step. */

import { announce, byId, element, say } from "./dom.js";
import { REACH, signed } from "./pose.js";

const STEPS = 11;

export class SweepDialog {
  #sheet = null;

  constructor() {
    const dialog = byId("sweep");
    byId("close-sweep").addEventListener("click", () => this.close());
    let pressed = null;
    dialog.addEventListener("pointerdown", ({ target }) => (pressed = target));
    dialog.addEventListener("click", ({ target }) => { // a text selection that ends beyond the edge is a click on the dialog, too
      if (target === dialog && pressed === dialog) this.close(); // a click beside it: its page fills it
    });
    dialog.addEventListener("close", () => {
      this.#forget();
      byId("key").before(byId("notices"), byId("announcement"));
    });
  }

  get query() {
    return [["low", -REACH], ["high", REACH], ["steps", STEPS], ["names", false]]; // this page shows the names as text, for all to read
  }

  /** Opens at once, and says that the pictures are being drawn. */
  open(whose, names) {
    this.#forget();
    say(byId("sweep-hint"), `Each row moves one dimension of ${whose} from ${signed(-REACH)} to ${signed(REACH)}; the others stay as they were before any slider was moved.`);
    byId("sheet").replaceChildren(element("p", { class: "hint" }, `Drawing ${names.length * STEPS} pictures …`));
    byId("sweep").append(byId("notices"), byId("announcement")); // behind an open dialog they would be dimmed, and not read out
    byId("sweep").showModal();
  }

  show(picture, whose, names) {
    this.#sheet = picture;
    picture.alt = `${names.length} by ${STEPS} drawings of ${whose}`;
    const rows = element("ol", { class: "rows", start: 0 }, ...names.map((name) => element("li", {}, element("span", {}, name))));
    const columns = element("p", { class: "columns", "aria-hidden": "true" });
    columns.append(...[-REACH, 0, REACH].map((delta) => element("span", {}, signed(delta))));
    byId("sheet").replaceChildren(columns, rows, element("div", { class: "plate" }, picture));
    announce(picture.alt);
  }

  close() {
    byId("sweep").close();
  }

  fail(sentence) {
    byId("sheet").replaceChildren(element("p", { class: "notice bad", role: "alert" }, sentence));
  }

  #forget() {
    this.#sheet?.forget();
    this.#sheet = null;
  }
}
