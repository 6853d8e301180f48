/** Keeps asking a service that is away or busy, and says so; whoever asked just waits for the answer. */

import { Busy, Unreachable } from "./api.js";

const FIRST = 500; // milliseconds between two tries, growing to
const LAST = 4000;
const LONGEST = 30; // seconds that a busy service is left alone, whatever it asks for: somebody is waiting

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

  /** The result of `work()`, asked again until there is one, or until nobody wants it any more. */
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
            await wanted(pause(delay), signal); // it may be ready and yet not answer this
            await wanted((this.#back ??= this.#wait()), signal);
          } else {
            throw error;
          }
          signal?.throwIfAborted();
        }
      }
    } finally {
      this.#asking -= 1;
      if (!this.#asking) this.#tell("ready"); // it answered, be it no
    }
  }

  /** Until the service is ready; all who wait share this one wait. */
  async #wait() {
    for (let delay = FIRST; !(await this.#api.ready()); delay = grown(delay)) await pause(delay);
    this.#back = null;
  }
}

const grown = (delay) => Math.min(LAST, delay * 1.5);
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Until that is over, or nobody waits for it any more. */
const wanted = (wait, signal) =>
  Promise.race([wait, new Promise((resolve) => (signal?.aborted ? resolve() : signal?.addEventListener("abort", resolve)))]);
