/** One piece of work at a time, and of what comes meanwhile only the newest: who draws quickly shall not queue up answers. */

export class Latest {
  #pause;
  #timer = 0;
  #waiting = null;
  #running = null;

  /** At least `pause` milliseconds pass between being asked and starting, unless the asker says `now`. */
  constructor(pause = 0) {
    this.#pause = pause;
  }

  /** `work(signal)` is async; when the signal is aborted nobody wants its result any more. */
  ask(work, { now = false } = {}) {
    this.#waiting = work;
    if (now) {
      clearTimeout(this.#timer);
      this.#timer = 0;
    }
    if (!this.#running && !this.#timer) {
      if (now || !this.#pause) this.#run();
      else this.#timer = setTimeout(() => ((this.#timer = 0), this.#run()), this.#pause);
    }
  }

  /** Whether more is to be done after what is being done. */
  get more() {
    return Boolean(this.#waiting || this.#timer);
  }

  drop() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#waiting = null;
    this.#running?.abort();
  }

  async #run() {
    while (this.#waiting && !this.#running) {
      const work = this.#waiting;
      const running = new AbortController();
      this.#waiting = null;
      this.#running = running;
      try {
        await work(running.signal);
      } catch (error) {
        if (!running.signal.aborted) throw error;
      } finally {
        this.#running = null;
      }
    }
  }
}
