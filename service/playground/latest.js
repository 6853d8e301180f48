/** Runs one piece of work at a time, and of those that come meanwhile only the newest, so that quick drawing queues up nothing. */

export class Latest {
  #pause;
  #timer = 0; // while it runs, what waits is not started
  #waiting = null;
  #running = null;

  /** At least `pause` milliseconds pass from the first `ask` to the start, and so from one start to the next, unless a caller says `now`. */
  constructor(pause = 0) {
    this.#pause = pause;
  }

  /** `work(signal)` is async; when the signal is aborted nobody wants its result any more. */
  ask(work, { now = false } = {}) {
    if (now) this.#stop();
    else if (this.#pause && !this.#waiting) this.#timer = setTimeout(() => (this.#stop(), this.#run()), this.#pause);
    this.#waiting = work;
    this.#run();
  }

  /** Whether more work waits for the present one to end. */
  get more() {
    return Boolean(this.#waiting);
  }

  drop() {
    this.#stop();
    this.#waiting = null;
    this.#running?.abort();
  }

  #stop() {
    clearTimeout(this.#timer);
    this.#timer = 0;
  }

  async #run() {
    while (this.#waiting && !this.#timer && !this.#running) {
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
