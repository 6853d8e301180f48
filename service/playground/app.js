/** Puts the page's parts together: sends what is drawn, and shows what is answered. */

import { AnswerView, invitation, readPictures } from "./answer.js";
import { Api, Refused } from "./api.js";
import { copyCommand, showCommand } from "./command.js";
import { Connection } from "./connection.js";
import { PATIENCE, announce, byId, enable, element, say } from "./dom.js";
import { Drawing } from "./drawing.js";
import { Examples } from "./examples.js";
import { Latest } from "./latest.js";
import { MorphPanel } from "./morph.js";
import { loadImage, read } from "./pixels.js";
import { PosePanel } from "./pose.js";
import { SweepDialog } from "./sweep.js";
import { acceptPictures } from "./upload.js";

const LIVE = 80; // milliseconds between two requests while the pen moves
const LOOK = 15000; // milliseconds between two checks of what is served, if anything is

const api = new Api(showCommand);
const connection = new Connection(api, showState);
const drawing = new Drawing(byId("drawing"));
const answers = new AnswerView();
const pose = new PosePanel((byHand) => drawPose(byHand));
const morph = new MorphPanel(drawMorph);
const sweep = new SweepDialog();
const examples = new Examples({
  draw: (parameters) => connection.persist(() => api.draw("reconstruct", parameters, { quiet: true })),
  place: (example, { manifest }) => drawing.place(example, manifest.max_objects > 1),
  showRefusal: (error) => showRefusal("examples", error),
});
const work = { models: new Latest(), predict: new Latest(LIVE), pose: new Latest(), morph: new Latest(), sweep: new Latest() };

let requestedModel = new URLSearchParams(location.search).get("model");
let model = null; // as GET /models/{name} returns it
let pictures = null; // what is believed of each object of the last answer
let keyGiven = false; // a key was entered, and nothing has been answered with it yet
let keepTimer = 0; // timer of the next try to keep the drawing
let lateTimer = 0; // timer after which the answer to the previous drawing is cleared
let saysNoAnswer = false; // whether the page says that there is no answer yet
let isNew = true; // this is another digit than the last answer's, so its pose begins unmoved
let lostFile = history.state?.file; // name of the picture on the slate when the page was left; it does not come back

// Asking

/** Runs `ask(signal)` until it has an answer, which goes to `show` at once unless something newer has come. */
function start(kind, ask, show, options) {
  if (kind === "predict") byId("answer").setAttribute("aria-busy", true);
  work[kind].ask(async (signal) => {
    try {
      const answer = await connection.persist(() => ask(signal), signal);
      if (signal.aborted) return;
      show(answer);
      hideRefusal(kind);
    } catch (error) {
      if (!signal.aborted) showRefusal(kind, error);
    } finally {
      if (kind === "predict") byId("answer").setAttribute("aria-busy", work.predict.more);
    }
  }, options);
}

/** Asks what is served, if anything is. A model that was replaced is set up anew: its old poses mean nothing now. */
function askModels() {
  start("models", async (signal) => {
    const models = await api.models(signal);
    const byName = (sought) => models.find(({ name }) => name === sought);
    const chosen = byName(requestedModel) ?? byName(model?.name) ?? models.find((each) => each.default) ?? models[0];
    const missing = byName(requestedModel) ? null : requestedModel;
    return { models, missing, chosen: same(chosen, model) ? model : await api.model(chosen.name, signal) };
  }, ({ models, missing, chosen }) => {
    const options = [...byId("model").options].map(({ value }) => value);
    if (models.map(({ name }) => name).join() !== options.join()) { // otherwise an open list would close
      byId("model").replaceChildren(...models.map(({ name }) => element("option", { value: name }, name)));
    }
    byId("model").disabled = false;
    if (byId("key").contains(document.activeElement)) byId("model").focus(); // otherwise the focus would go with the form
    byId("key").hidden = true;
    keyGiven = false;
    if (chosen === model) byId("model").value = model.name;
    else setModel(chosen);
    if (missing) forgetModel(missing);
  });
}

const same = (...models) => new Set(models.map((each) => JSON.stringify([each?.name, each?.version, each?.classes]))).size === 1;

function chooseModel(name) {
  requestedModel = name;
  keep();
  askModels();
}

/** Stops asking for a model that is not served: once it is, it would replace the present one in the middle of the work. */
function forgetModel(name) {
  requestedModel = null;
  keep();
  remark(`There is no model ${name} here; ${model.name} answers.`);
}

function setModel(chosen) {
  drop("predict", "pose", "morph");
  const replaced = model?.name === chosen.name;
  model = chosen;
  byId("refused").hidden = true;
  byId("model").value = model.name;
  byId("model").title = `${model.variant} on ${model.provider}, version ${model.version}`;
  isNew = true;
  saysNoAnswer = false;
  answers.setModel(model);
  const [, height, width] = model.image_shape;
  drawing.aspect = width / height;
  invite();
  morph.setModel();
  pose.setModel(model);
  examples.show(model);
  predict({ now: true });
  if (replaced) remark(`${model.name} was replaced by a new version: sliders and kept digits are reset.`);
  if (lostFile && drawing.empty) remark(`${lostFile} is not kept when you leave: choose it again.`);
  lostFile = null;
}

/** Drops requests whose answer nobody wants any more. */
function drop(...kinds) {
  if (kinds.includes("predict")) stopLateTimer();
  for (const kind of kinds) work[kind].drop();
  byId("answer").setAttribute("aria-busy", false);
}

function predict(options) {
  if (!model || drawing.empty) {
    drop("predict");
    hideRefusal("predict");
    isNew = true;
    if (!model) return;
    clearAnswer();
    return;
  }
  if (isNew) lateTimer ||= setTimeout(() => (lateTimer = 0, isNew && showNoAnswer()), PATIENCE);
  start("predict", async (signal) => {
    const answer = await api.predict(await drawing.picture(), model.name, signal);
    return { answer, ...(await readPictures(answer)) };
  }, ({ answer, seen, believed }) => {
    stopLateTimer();
    saysNoAnswer = false;
    answers.show(answer, seen, believed, isNew);
    pictures = believed;
    pose.setObjects(answer.objects, { isNew });
    offerToMorph();
    isNew = false;
  }, options);
}

/** Clears the answer and what could be turned: they belong to another drawing. */
function clearAnswer(...words) {
  saysNoAnswer = false;
  answers.clear(...words);
  morph.offer(null);
  pose.setObjects([]);
}

function stopLateTimer() {
  clearTimeout(lateTimer);
  lateTimer = 0;
}

function showNoAnswer() {
  if (saysNoAnswer || byId("answer").getAttribute("aria-busy") !== "true") return;
  clearAnswer("No answer yet", "It comes as soon as the service gives it.");
  saysNoAnswer = true;
}

function drawPose(byHand) {
  if (byHand) offerToMorph();
  const ask = async (signal) => read(await api.draw("reconstruct", pose.query, { signal, quiet: !byHand }));
  start("pose", ask, (picture) => pose.show(picture));
}

function drawMorph() {
  if (!model) return;
  const [description, query] = [morph.describe(), [["model", model.name], ...morph.query]];
  const ask = async (signal) => loadImage(await api.draw("reconstruct/morph", query, { signal }));
  start("morph", ask, (picture) => morph.show(picture, description));
}

function drawSweep() {
  const [whose, names, query] = [pose.describe(), pose.names, [...pose.subject, ...sweep.query]];
  sweep.open(whose, names);
  const ask = async (signal) => loadImage(await api.draw("reconstruct/sweep", query, { signal }));
  start("sweep", ask, (picture) => sweep.show(picture, whose, names));
}

// Showing

/** Writes on the empty slate what to draw, or the name of a file that cannot be shown. */
const invite = () => say(byId("invitation"), drawing.hiddenFile || invitation(model));

/** Keeps drawing and model in this entry of the tab's history, so that they survive a visit to the docs and a reload. This is done at
 * once, not when the page is left: then browsers accept no more, and a phone that needs memory drops a hidden page without notice. */
function keep() {
  clearTimeout(keepTimer);
  try {
    history.replaceState({ drawing: drawing.kept, file: drawing.file }, "", requestedModel ? `?${new URLSearchParams({ model: requestedModel })}` : location.pathname);
  } catch { // Safari allows a hundred in half a minute
    keepTimer = setTimeout(keep, 1000);
  }
}

function offerToMorph() {
  const index = pictures && pose.object ? pose.index : -1;
  morph.offer(index < 0 ? null : pose.object, pictures?.[index]);
}

let stateTimer = 0;

/** Shows the service's state in the corner, unless it lasts only a moment. */
function showState(state, sentence) {
  clearTimeout(stateTimer);
  const before = byId("state").dataset.state;
  if (state === "ready" && before === "unreachable") askModels(); // another service may have come back
  if (state === "ready" && !byId("unreachable").hidden) announce("The service is back.");
  const show = () => {
    byId("state").dataset.state = state;
    say(byId("state"), state);
  };
  if (state === "asking") {
    if (before === "ready") stateTimer = setTimeout(show, PATIENCE);
    return;
  }
  show();
  const away = state === "unreachable" || state === "busy";
  if (away) showNoAnswer();
  byId("unreachable").hidden = !away;
  if (state === "unreachable") say(byId("unreachable"), "The service does not answer. Your drawing is kept; this page continues when the service is back.");
  if (state === "busy") say(byId("unreachable"), `The service is busy: ${sentence}. Your drawing is kept, and sent again in a moment.`);
}

function showRefusal(kind, error) {
  const fault = !(error instanceof Refused);
  if (fault) console.error(error);
  if (error.status === 401) {
    if (kind === "predict") clearAnswer("No answer yet", "It comes once you enter the key.");
    return askForKey();
  }
  if (kind !== "models") askModels(); // the model may have been replaced, and its poses or name refused because of that
  if (kind === "sweep") return sweep.fail(error.message);
  if (kind === "predict") {
    const whose = error.status < 500 ? "The service cannot use this picture." : "The picture may be fine; see what went wrong.";
    clearAnswer("No answer", whose);
  }
  notice(kind, fault ? `This page failed: ${error.message}. Reload it to continue.` : error.message);
}

/** Shows a sentence that is no refusal, and goes with the next stroke. */
const remark = (sentence) => notice("remark", sentence);

function notice(kind, sentence) {
  byId("refused").dataset.kind = kind;
  byId("refused").classList.toggle("bad", kind !== "remark");
  if (kind === "models") say(byId("refusal"), sentence); // not read out again each time that models are asked for
  else byId("refusal").replaceChildren(sentence); // read out again even if it is the same, since the picture is another
  byId("refused").hidden = false;
}

function hideRefusal(kind) {
  if (byId("refused").dataset.kind === kind) byId("refused").hidden = true;
}

function askForKey() {
  const asked = !byId("key").hidden;
  byId("key").hidden = false;
  sweep.close();
  say(byId("state"), "needs its key");
  byId("state").dataset.state = "locked";
  if (!asked || keyGiven) { // otherwise somebody may be typing there already, or elsewhere
    say(byId("key").querySelector("label"), keyGiven ? "That is not the key; try again" : "This service needs its key");
    byId("key-field").focus();
    if (keyGiven) announce(byId("key").querySelector("label").textContent); // the field had the focus already, so it is not read out again
  }
  keyGiven = false;
}

// Listening

drawing.addEventListener("change", ({ detail }) => {
  forgetPicture();
  enable(byId("undo"), drawing.undoable, byId("file"));
  enable(byId("clear"), !drawing.empty, byId(drawing.undoable ? "undo" : "file"));
  byId("invitation").hidden = !drawing.empty && !drawing.hiddenFile;
  invite();
  byId("drawing").setAttribute("aria-label", `Your drawing: ${drawing.describe()}`);
  isNew ||= detail.isNew;
  if (detail.isNew) drop("predict"); // otherwise its answer would be taken for this one's
  hideRefusal("remark");
  predict({ now: !detail.drawing });
  if (!detail.drawing) keep();
});
const forgetPicture = acceptPictures({
  input: byId("file"),
  slate: byId("slate"),
  take: (...picture) => drawing.put(...picture),
  remark,
});
byId("dismiss").addEventListener("click", () => {
  byId("refused").hidden = true;
  byId("answer").focus({ preventScroll: true }); // otherwise the focus would be lost
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // a jump within the page would add an entry to the history, without the drawing
  byId("answer").focus();
});
visualViewport?.addEventListener("resize", () => byId("slate").classList.toggle("zoomed", visualViewport.scale > 1));
byId("undo").addEventListener("click", () => drawing.undo());
byId("clear").addEventListener("click", () => drawing.clear());
document.addEventListener("keydown", (event) => {
  const foreign = /^(?!\p{Script=Latin})\p{L}$/u.test(event.key); // Cyrillic, for example, has no z: there the key's position counts
  const undoes = foreign ? event.code === "KeyZ" : event.key?.toLowerCase() === "z";
  if (!undoes || !(event.ctrlKey || event.metaKey) || event.shiftKey) return;
  if (event.target.matches("[type=number], [type=password]") || byId("sweep").open) return; // the browser undoes typing there
  event.preventDefault();
  if (drawing.undoable) drawing.undo();
});
byId("open-sweep").addEventListener("click", drawSweep);
byId("sweep").addEventListener("close", () => work.sweep.drop());
byId("copy").addEventListener("click", copyCommand);
byId("model").addEventListener("change", () => chooseModel(byId("model").value));
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key = byId("key-field").value;
  byId("key-field").value = "";
  keyGiven = true;
  drop("predict", "pose", "morph");
  model = null; // so that all is asked anew
  askModels();
});
const look = () => document.visibilityState === "visible" && askModels();
setInterval(look, LOOK);
document.addEventListener("visibilitychange", look);
for (const event of ["online", "offline"]) window.addEventListener(event, look);
window.addEventListener("unhandledrejection", ({ reason }) => showRefusal("page", reason));

askModels();

if (history.state?.drawing) drawing.restore(history.state.drawing);
