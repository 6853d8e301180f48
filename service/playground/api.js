/** The service's HTTP API, as this page needs it. Knows no page: what goes wrong is thrown, as one of the three below. */

const KEY = "capserve.key"; // in sessionStorage: this tab's, and back with it where a browser reopens it
const LIMIT = 20000; // milliseconds for an answer; the service gives up after half of that, unless it is set otherwise
const SLOWEST = 16; // bytes that go up in a millisecond on the slowest line: what is sent takes its time before an answer can begin
const GLANCE = 4000; // the same, for a look whether it is back

/** The service said no; its sentence says what to do. */
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** The service asks to be asked again in `seconds`. */
export class Busy extends Error {
  constructor(detail, seconds) {
    super(detail);
    this.seconds = seconds;
  }
}

/** Nobody answered, or not to the end, or not the service. */
export class Unreachable extends Error {}

export class Api {
  #told;
  #key = null;

  /** `told({ command, note, milliseconds, stages })` hears of every picture that was asked for and given; of one that was refused,
   *  `told({ command, note, status })`. */
  constructor(told) {
    this.#told = told;
  }

  set key(key) {
    this.#key = key;
    stored((storage) => storage.setItem(KEY, key));
  }

  async models(signal) {
    return (await this.#ask("models", asJson, { signal })).content.models;
  }

  async model(name, signal) {
    return (await this.#ask(`models/${encodeURIComponent(name)}`, asJson, { signal })).content;
  }

  /** `picture` is a blob and, where the user has it or can save it as a file, its name; `note` says what is to be done for that. */
  async predict(picture, model, signal) {
    const path = `predict?${new URLSearchParams({ model, input: true })}`;
    const headers = { "Content-Type": picture.blob.type || "application/octet-stream" };
    const asked = this.#ask(path, asJson, { method: "POST", headers, body: picture.blob, signal });
    return this.#tell(asked, () => posted(address(path), picture, this.#known()), picture.note);
  }

  /** GET /reconstruct and what is below it: a PNG as a blob. `quiet` requests are the page's own, not the user's. */
  async draw(path, parameters, { signal, quiet = false } = {}) {
    const query = `${path}?${new URLSearchParams(parameters)}`;
    const asked = this.#ask(query, asPicture, { signal });
    if (quiet) return (await asked).content;
    return this.#tell(asked, () => `curl -s -o ${path.split("/").at(-1)}.png${keyed(this.#known())} '${address(query)}'`);
  }

  /** Whether to ask again: any answer of the service's own will do, which is not ready while another model fails, and any no of a
   *  proxy that lets nobody see /readyz. */
  async ready() {
    try {
      const response = await request("readyz", { cache: "no-store", signal: until(GLANCE) });
      return response.status < 500 || "state" in (await response.json());
    } catch {
      return false;
    }
  }

  #known() {
    return this.#key ?? stored((storage) => storage.getItem(KEY));
  }

  /** `take(response)` reads the body, which may break off as everything else may. */
  async #ask(path, take, { method = "GET", headers = {}, body, signal } = {}) {
    const key = this.#known();
    if (key) headers = { ...headers, "X-API-Key": key };
    const patience = until(LIMIT + (body?.size ?? 0) / SLOWEST, signal);
    const asked = performance.now();
    let response, milliseconds, content;
    try {
      response = await request(path, { method, headers, body, signal: patience });
      milliseconds = performance.now() - asked;
      content = await (response.ok ? take : sentence)(response);
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Unreachable("the service does not answer");
    }
    if (response.ok) return { content, milliseconds, timing: response.headers.get("Server-Timing") ?? "" };
    if (response.status === 502) throw new Unreachable(content); // of a proxy, behind which nobody is
    if ([429, 503, 504].includes(response.status)) { // the first is a proxy's, where many ask
      throw new Busy(content, Number(response.headers.get("Retry-After")) || 1);
    }
    throw new Refused(response.status, content);
  }

  /** The content of what was asked, once it is told how it went; a command may be as long as its picture, and nobody reads those of
   *  requests that were dropped. */
  async #tell(asked, command, note = "") {
    try {
      const { content, milliseconds, timing } = await asked;
      this.#told({ command: await command(), note, milliseconds, stages: stages(timing) });
      return content;
    } catch (error) {
      if (error instanceof Refused) this.#told({ command: await command(), note, status: error.status });
      throw error;
    }
  }
}

/** fetch, with what a proxy's login left in the browser. It says that a script asks: then no answer makes the browser ask its user for a
 *  password, which the page does itself. */
function request(path, { headers, ...how }) {
  return fetch(address(path), { ...how, headers: { ...headers, "X-Requested-With": "XMLHttpRequest" } });
}

/** AbortSignal.any of `signal` and AbortSignal.timeout, which tablets in classrooms lack. */
function until(milliseconds, signal) {
  const both = new AbortController();
  setTimeout(() => both.abort(), milliseconds);
  if (signal?.aborted) both.abort();
  signal?.addEventListener("abort", () => both.abort(), { once: true });
  return both.signal;
}

/** Where a browser is told to store nothing, the mere mention of its storage throws: then the key lasts until the page goes. */
function stored(use) {
  try {
    return use(sessionStorage);
  } catch {
    return null;
  }
}

const asJson = (response) => response.json();

async function asPicture(response) {
  const blob = await response.blob();
  if (!blob.type.startsWith("image/")) throw new TypeError("no picture"); // but perhaps somebody's page to log in
  return blob;
}

/** Relative to the page, so that the service may live below any path of a host; without a login that was opened with it, with which
 *  browsers fetch nothing, and which is nobody's to copy. */
function address(path) {
  return Object.assign(new URL(path, document.baseURI), { username: "", password: "" }).href;
}

/** `detail` of problem+json; a proxy on the way may have answered in something else. */
async function sentence(response) {
  const large = response.status === 413 ? ": the picture is larger than a server in between takes" : "";
  const otherwise = `the answer was ${response.status} ${response.statusText}`.trim() + large;
  try {
    return (await response.json()).detail ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** "decode;dur=0.8, total;dur=3.1" -> { decode: 0.8, total: 3.1 } */
function stages(header) {
  return Object.fromEntries([...header.matchAll(/([\w-]+);dur=([\d.]+)/g)].map(([, name, value]) => [name, Number(value)]));
}

const keyed = (key) => (key ? ' -H "X-API-Key: $CAPSERVE_API_KEY"' : "");

/** A file of the user's is named; a drawing is nowhere but in this page, so the command carries it. */
async function posted(url, picture, key) {
  if (picture.name) return `curl -s${keyed(key)} -F ${quoted(`file=@"${picture.name.replace(/["\\]/g, "\\$&")}"`)} '${url}'`;
  const image = await base64(picture.blob);
  return `curl -s${keyed(key)} '${url}' -H 'Content-Type: application/json' -d '{"image": "${image}"}'`;
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
