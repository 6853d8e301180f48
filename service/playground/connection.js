/** Keeps asking a service that is away or busy, and says so; callers just wait for the answer. */

import { Busy, Unreachable } from "./api.js";

const FIRST = 500; // milliseconds between two tries, growing to
const LAST = 4000;
const LONGEST = 30; // most seconds before a busy service is asked again, whatever it says: somebody is waiting

export class Connection {
  #api;
  #tell;
  #asking = 0;
  #back = null;

  /** `tell(state, sentence)`: ready, asking, busy or unreachable. */
  constructor(api, tell) {
    this.#api = api;
    this.#tell = tell;
  }

  /** Returns the result of `work()`, repeated until there is one or nobody wants it any more. */
  async persist(work, signal) {
    this.#asking += 1;
    this.#tell("asking");
    try {
      for (let delay = FIRST; ; delay = grown(delay)) {
        try {
          return await work();
        } catch (error) {
          if (error instanceof Busy) {
            this.#tell("busy", error.message);
            await wanted(pause(Math.min(LONGEST, error.seconds) * 1000), signal);
          } else if (error instanceof Unreachable) {
            this.#tell("unreachable", error.message);
            await wanted(pause(delay), signal); // the service may be ready and yet not answer this
            await wanted((this.#back ??= this.#wait()), signal);
          } else {
            throw error;
          }
          signal?.throwIfAborted();
        }
      }
    } finally {
      this.#asking -= 1;
      if (!this.#asking) this.#tell("ready"); // it answered, even if it refused
    }
  }

  /** Waits until the service is ready; all callers share one wait. */
  async #wait() {
    for (let delay = FIRST; !(await this.#api.ready()); delay = grown(delay)) await pause(delay);
    this.#back = null;
  }
}

const grown = (delay) => Math.min(LAST, delay * 1.5);
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Waits until `wait` is over, or nobody wants it any more. */
const wanted = (wait, signal) =>
  Promise.race([wait, new Promise((resolve) => (signal?.aborted ? resolve() : signal?.addEventListener("abort", resolve)))]);
