/** Keeps asking a service that is away or busy, and says so; callers just wait for the answer. */

import { Busy, Unreachable } from "./api.js";

const FIRST_PAUSE = 500; // milliseconds between two tries, growing to
const LONGEST_PAUSE = 4000;
const LONGEST = 30; // most seconds before a busy service is asked again, whatever it says: somebody is waiting

export class Connection {
  #api;
  #showState;
  #asking = 0;
  #readyAgain = null;

  /** `showState(state, sentence)`: ready, asking, busy or unreachable. */
  constructor(api, showState) {
    this.#api = api;
    this.#showState = showState;
  }

  /** Returns the result of `work()`, repeated until there is one or nobody wants it any more. */
  async persist(work, signal) {
    this.#asking += 1;
    this.#showState("asking");
    try {
      for (let delay = FIRST_PAUSE; ; delay = grown(delay)) {
        try {
          return await work();
        } catch (error) {
          if (error instanceof Busy) {
            this.#showState("busy", error.message);
            await whileWanted(pause(Math.min(LONGEST, error.seconds) * 1000), signal);
          } else if (error instanceof Unreachable) {
            this.#showState("unreachable", error.message);
            await whileWanted(pause(delay), signal); // the service may be ready and yet not answer this
            await whileWanted((this.#readyAgain ??= this.#waitUntilReady()), signal);
          } else {
            throw error;
          }
          signal?.throwIfAborted();
        }
      }
    } finally {
      this.#asking -= 1;
      if (!this.#asking) this.#showState("ready"); // it answered, even if it refused
    }
  }

  /** Waits until the service is ready; all callers share one wait. */
  async #waitUntilReady() {
    for (let delay = FIRST_PAUSE; !(await this.#api.ready()); delay = grown(delay)) await pause(delay);
    this.#readyAgain = null;
  }
}

const grown = (delay) => Math.min(LONGEST_PAUSE, delay * 1.5);
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** Waits until `wait` is over, or nobody wants it any more. */
const whileWanted = (wait, signal) =>
  Promise.race([wait, new Promise((resolve) => (signal?.aborted ? resolve() : signal?.addEventListener("abort", resolve)))]);
