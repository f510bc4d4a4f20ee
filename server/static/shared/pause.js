// A timer that can be given up.

const NEVER = new AbortController().signal;

/** Resolves after so many milliseconds; rejects with the signal's reason as soon as that is aborted. */
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
