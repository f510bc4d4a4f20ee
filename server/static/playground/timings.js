// Measurements of a streamed answer: time to first token, speed, token counts, and how it ended.

const SHORTEST = 0.02; // seconds; below this, a rate measures network packets and not the model
const ENDINGS = {
  stop: "stop",
  length: "length (max_tokens)",
  timeout: "timeout",
  stopped: "stopped by user",
  refused: "rejected",
  failed: "failed",
};

export class Timings {
  #nTokens = 0;
  #sent = performance.now();
  #first = null;
  #last = null;
  #usage = null;
  #end = null;

  /** Shows the figures in `element`, a list whose dd elements have data-figure attributes. */
  constructor(element) {
    this.element = element;
    this.show();
  }

  /** Record an event that has just arrived. */
  record({ text, tokens, finish, usage }) {
    if (text) this.#first ??= performance.now();
    if (tokens.length && this.#first !== null) this.#last = performance.now();
    this.#nTokens += tokens.length;
    this.#usage = usage ?? this.#usage;
    if (finish) this.#end = finish;
  }

  /** Set how the answer ended, if the server has not said so. */
  end(how) {
    this.#end ??= how;
  }

  get ending() {
    return ENDINGS[this.#end] ?? "";
  }

  /** Whole seconds since the request was sent, or null once there is text. */
  get waited() {
    return this.#first === null ? Math.round((performance.now() - this.#sent) / 1000) : null;
  }

  show() {
    const usage = this.#usage ?? {};
    const completion = usage.completion_tokens ?? this.#nTokens;
    const seconds = (this.#last - this.#first) / 1000;
    const figures = {
      ttft: this.#first && `${(this.#first - this.#sent).toFixed(0)} ms`,
      rate: seconds >= SHORTEST ? ((completion - 1) / seconds).toFixed(0) : null,
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens,
      completion: completion || null,
      ending: this.ending || null,
    };
    for (const element of this.element.querySelectorAll("[data-figure]"))
      element.textContent = figures[element.dataset.figure] ?? "–";
  }
}
