// A timer that can be aborted, and work that it repeats.

const NEVER = new AbortController().signal;

/** Resolve after `milliseconds`. Reject with the signal's reason as soon as it is aborted. */
export function pause(milliseconds, signal = NEVER) {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const abort = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", abort);
      resolve();
    }, milliseconds);
    signal.addEventListener("abort", abort, { once: true });
  });
}

/** Work that is repeated while it is wanted: work(signal), which never rejects. */
export class Repeated {
  #job = null;

  constructor(work, milliseconds) {
    this.work = work;
    this.milliseconds = milliseconds;
  }

  /** Start or stop. Stopping aborts the signal. */
  want(isWanted) {
    if (isWanted && this.#job === null) this.#repeat((this.#job = new AbortController()).signal);
    if (isWanted) return;
    this.#job?.abort();
    this.#job = null;
  }

  async #repeat(signal) {
    while (!signal.aborted) {
      await this.work(signal);
      await pause(this.milliseconds, signal).catch(() => {});
    }
  }
}
