/** What this page needs of the service's HTTP API. It does not touch the page: errors are thrown, as one of the three below. */

const KEY = "capserve.key"; // in sessionStorage: for this tab, and there again if the browser reopens it
const ANSWER_LIMIT = 20000; // milliseconds for an answer; by default the service gives up after half of that
const SLOWEST = 16; // bytes per millisecond on the slowest line: an upload takes its time before an answer can begin
const CHECK_LIMIT = 4000; // milliseconds for a check whether the service is back

/** The service refused; its sentence says what to do. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** The service wants to be asked again in `seconds`. */
export class Busy extends Error {
  constructor(detail, seconds) {
    super(detail);
    this.seconds = seconds;
  }
}

/** There was no answer, an incomplete one, or one that is not the service's. */
export class Unreachable extends Error {}

export class Api {
  #report;
  #key = null;

  /** `report({ command, note, milliseconds, stages })` is called for every picture that was asked for and answered,
   *  `report({ command, note, status })` for one that was refused. */
  constructor(report) {
    this.#report = report;
  }

  set key(key) {
    this.#key = key;
    withStorage((storage) => storage.setItem(KEY, key));
  }

  async models(signal) {
    return (await this.#ask("models", asJson, { signal })).content.models;
  }

  async model(name, signal) {
    return (await this.#ask(`models/${encodeURIComponent(name)}`, asJson, { signal })).content;
  }

  /** `picture` is a blob and, if the user has it or can save it as a file, its name; `note` says what to do for that. */
  async predict(picture, model, signal) {
    const path = `predict?${new URLSearchParams({ model, input: true })}`;
    const headers = { "Content-Type": picture.blob.type || "application/octet-stream" };
    const answer = this.#ask(path, asJson, { method: "POST", headers, body: picture.blob, signal });
    return this.#reported(answer, () => predictCommand(address(path), picture, this.#currentKey()), picture.note);
  }

  /** GET /reconstruct and the paths below it: a PNG as a blob. `quiet` requests are the page's own, not the user's. */
  async draw(path, parameters, { signal, quiet = false } = {}) {
    const query = `${path}?${new URLSearchParams(parameters)}`;
    const answer = this.#ask(query, asPicture, { signal });
    if (quiet) return (await answer).content;
    return this.#reported(answer, () => `curl -s -o ${path.split("/").at(-1)}.png${keyHeader(this.#currentKey())} '${address(query)}'`);
  }

  /** Whether to ask again. Any answer of the service's own counts, since it is not ready while another model fails, and any refusal
   *  by a proxy that hides /readyz. */
  async ready() {
    try {
      const response = await request("readyz", { cache: "no-store", signal: abortAfter(CHECK_LIMIT) });
      return response.status < 500 || "state" in (await response.json());
    } catch {
      return false;
    }
  }

  #currentKey() {
    return this.#key ?? withStorage((storage) => storage.getItem(KEY));
  }

  /** `readBody(response)` reads the body, which may fail like everything else. */
  async #ask(path, readBody, { method = "GET", headers = {}, body, signal } = {}) {
    const key = this.#currentKey();
    if (key) headers = { ...headers, "X-API-Key": key };
    const patience = abortAfter(ANSWER_LIMIT + (body?.size ?? 0) / SLOWEST, signal);
    const start = performance.now();
    let response, milliseconds, content;
    try {
      response = await request(path, { method, headers, body, signal: patience });
      milliseconds = performance.now() - start;
      content = await (response.ok ? readBody : detailOf)(response);
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Unreachable("the service does not answer");
    }
    if (response.ok) return { content, milliseconds, timing: response.headers.get("Server-Timing") ?? "" };
    if (response.status === 502) throw new Unreachable(content); // of a proxy with no server behind it
    if ([429, 503, 504].includes(response.status)) { // 429 is a proxy's, when many ask
      throw new Busy(content, Number(response.headers.get("Retry-After")) || 1);
    }
    throw new Refused(response.status, content);
  }

  /** Returns the content once `report` is called. The command is made only then: it may be as long as its picture, and nobody reads
   *  those of requests that were dropped. */
  async #reported(answer, command, note = "") {
    try {
      const { content, milliseconds, timing } = await answer;
      this.#report({ command: await command(), note, milliseconds, stages: stages(timing) });
      return content;
    } catch (error) {
      if (error instanceof Refused) this.#report({ command: await command(), note, status: error.status });
      throw error;
    }
  }
}

/** fetch, with the credentials that a proxy's login left in the browser. The header says that a script asks: then no answer makes the
 *  browser ask for a password, which the page does itself. */
function request(path, { headers, ...options }) {
  return fetch(address(path), { ...options, headers: { ...headers, "X-Requested-With": "XMLHttpRequest" } });
}

/** Does the work of AbortSignal.any and AbortSignal.timeout, which tablets in classrooms lack. */
function abortAfter(milliseconds, signal) {
  const controller = new AbortController();
  setTimeout(() => controller.abort(), milliseconds);
  if (signal?.aborted) controller.abort();
  signal?.addEventListener("abort", () => controller.abort(), { once: true });
  return controller.signal;
}

/** In a browser that is set to store nothing, mere access to its storage throws: then the key lasts as long as the page. */
function withStorage(use) {
  try {
    return use(sessionStorage);
  } catch {
    return null;
  }
}

const asJson = (response) => response.json();

async function asPicture(response) {
  const blob = await response.blob();
  if (!blob.type.startsWith("image/")) throw new TypeError("no picture"); // perhaps a login page
  return blob;
}

/** A URL relative to the page, so that the service may be below any path of a host; without a user and password in the page's URL,
 *  with which browsers refuse to fetch, and which nobody should copy. */
function address(path) {
  return Object.assign(new URL(path, document.baseURI), { username: "", password: "" }).href;
}

/** The `detail` of problem+json; a proxy on the way may have answered in another format. */
async function detailOf(response) {
  const large = response.status === 413 ? ": the picture is larger than a server in between takes" : "";
  const fallback = `the answer was ${response.status} ${response.statusText}`.trim() + large;
  try {
    return (await response.json()).detail ?? fallback;
  } catch {
    return fallback;
  }
}

/** "decode;dur=0.8, total;dur=3.1" -> { decode: 0.8, total: 3.1 } */
function stages(header) {
  return Object.fromEntries([...header.matchAll(/([\w-]+);dur=([\d.]+)/g)].map(([, name, value]) => [name, Number(value)]));
}

const keyHeader = (key) => (key ? ' -H "X-API-Key: $CAPSERVE_API_KEY"' : "");

/** The command names a file of the user's; a drawing exists only in this page, so the command contains it. */
async function predictCommand(url, picture, key) {
  if (picture.name) return `curl -s${keyHeader(key)} -F ${quoted(`file=@"${picture.name.replace(/["\\]/g, "\\$&")}"`)} '${url}'`;
  const image = await base64(picture.blob);
  return `curl -s${keyHeader(key)} '${url}' -H 'Content-Type: application/json' -d '{"image": "${image}"}'`;
}

const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;

function base64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
