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
  #nTokens;
  #sent;
  #first;
  #last;
  #usage;
  #end;

  /** Shows the figures in `element`, a list whose dd elements have data-figure attributes. */
  constructor(element) {
    this.element = element;
    this.begin();
    this.show();
  }

  begin() {
    this.#nTokens = 0;
    this.#sent = performance.now();
    this.#first = this.#last = this.#usage = this.#end = null;
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
    const {
      prompt_tokens: prompt,
      completion_tokens: completion,
      prompt_tokens_details: details,
    } = this.#usage ?? {};
    const nTokens = completion ?? this.#nTokens;
    const seconds = (this.#last - this.#first) / 1000;
    const rate = seconds >= SHORTEST ? (nTokens - 1) / seconds : null;
    this.#write(
      "ttft",
      this.#first === null ? null : `${(this.#first - this.#sent).toFixed(0)} ms`,
    );
    this.#write("rate", rate?.toFixed(0));
    this.#write("prompt", prompt);
    this.#write("cached", details?.cached_tokens);
    this.#write("completion", nTokens || null);
    this.#write("ending", this.ending || null);
  }

  #write(figure, value) {
    this.element.querySelector(`[data-figure="${figure}"]`).textContent = value ?? "–";
  }
}
