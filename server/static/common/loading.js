// Loads of one part of the page, of which only the last counts.

import { showError } from "./dom.js";

/**
 * Return run(work, onfail). It aborts the load before, and calls work(signal); meanwhile `part` is
 * busy. What it throws goes to onfail(error), and is shown in `message`.
 */
export function loading(part, message) {
  let job = null;
  return async (work, onfail) => {
    job?.abort();
    const { signal } = (job = new AbortController());
    showError(message, "");
    part.setAttribute("aria-busy", "true");
    try {
      await work(signal);
    } catch (error) {
      if (signal.aborted) return;
      onfail?.(error);
      showError(message, error.message);
    }
    if (!signal.aborted) part.removeAttribute("aria-busy");
  };
}
