// A timer that can be aborted.

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
