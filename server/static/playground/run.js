// One column: the settings of a request, its streamed answer, and measurements. Comparing takes two
// columns.

import { ApiError, stream } from "../common/api.js";
import { fromChat, fromCompletion } from "./deltas.js";
import { byId } from "../common/dom.js";
import { Placement } from "./placement.js";
import { N_CHOICES } from "./popover.js";
import { Settings } from "./settings/settings.js";
import { Timings } from "./timings.js";
import { revealed } from "../common/token_text.js";
import { TokenText } from "./tokens.js";

const EACH_SECOND = 1000;
const WIDE = "(min-width: 60rem)"; // as in playground.css: settings beside the text, not above it
const STREAMED = {
  stream: true,
  stream_options: { include_usage: true, continuous_usage_stats: true },
};

export class Run {
  #abort = null;
  #sent = null; // the request whose answer is shown

  /** Calls `changed` after each change of a setting. */
  constructor(name, card, changed) {
    this.card = card;
    this.element = byId("run-template").content.cloneNode(true).firstElementChild;
    this.element.dataset.run = name;
    for (const title of this.element.querySelectorAll(".of-run"))
      title.textContent = ` ${name.toUpperCase()}`;
    this.settings = new Settings(this.part("controls"), `setting-${name}`, card, changed);
    this.part("reset").addEventListener("click", () => {
      this.settings.restore();
      changed();
    });
    this.part("settings").open = matchMedia(WIDE).matches;
    this.timings = new Timings(this.part("figures"));
    this.tokens = new TokenText(this.part("text"), () => this.#measure());
  }

  part(name) {
    return this.element.querySelector(`[data-part="${name}"]`);
  }

  get isRunning() {
    return this.#abort !== null;
  }

  get hasAnswer() {
    return this.tokens.text !== "";
  }

  get sent() {
    return this.#sent;
  }

  /**
   * Return the { path, body } of a request for { prompt } or { messages }, or null if a setting is
   * invalid.
   */
  request(input, defaultSeed = null) {
    const fields = this.settings.fields();
    if (fields === null) return null;
    const seed = defaultSeed === null ? {} : { seed: defaultSeed };
    const isChat = "messages" in input;
    const scores = isChat ? { logprobs: true, top_logprobs: N_CHOICES } : { logprobs: N_CHOICES };
    const body = { model: this.card.model, ...input, ...seed, ...fields, ...scores, ...STREAMED };
    return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
  }

  /**
   * Send a request and show its answer. Return how it ended, in words. Never throws.
   *
   * The previous request must have ended.
   */
  async send({ path, body }) {
    this.clear();
    this.#sent = { path, body };
    this.part("seed").textContent = body.seed;
    const shown = (body.prompt ?? "") + (this.card.config.encoder === null ? "" : "\n");
    this.tokens.follow(() => this.part("prompt").replaceChildren(...revealed(shown)));
    this.#abort = new AbortController();
    this.element.setAttribute("aria-busy", "true");
    const { signal } = this.#abort;
    const clock = setInterval(() => this.#measure(), EACH_SECOND);
    try {
      await this.#show(stream(path, body, signal), "messages" in body ? fromChat : fromCompletion);
    } catch (error) {
      if (signal.aborted) this.timings.end("stopped");
      else this.#fail(error);
    } finally {
      clearInterval(clock);
      this.#abort = null;
      this.element.removeAttribute("aria-busy");
      this.#measure();
    }
    return this.timings.ending;
  }

  async #show(events, read) {
    const placement = new Placement();
    this.timings.begin();
    try {
      for await (const event of events) {
        const delta = read(event);
        this.timings.record(delta);
        this.tokens.add(placement.push(delta.text, delta.tokens));
      }
    } finally {
      this.tokens.add(placement.flush()); // also after an error
      this.tokens.draw();
    }
  }

  #measure() {
    const seconds = this.isRunning ? this.timings.waited : null;
    const message = seconds ? `waiting for the first token… ${seconds} s` : "";
    this.tokens.follow(() => {
      this.timings.show();
      this.part("waiting").replaceChildren(message);
    });
  }

  #fail(error) {
    this.timings.end(error.status ? "refused" : "failed");
    const isApiError = error instanceof ApiError;
    if (!isApiError) console.error(error);
    const message = isApiError ? error.message : `cannot read the answer: ${error.message}`;
    const wait = error.retryAfter ? ` · retry in ${error.retryAfter} s` : "";
    this.part("error").textContent = message + wait;
    this.tokens.follow(() => {
      this.part("error").hidden = false;
    });
    if (error.param) this.settings.showError(error.param, error.message);
  }

  /** Scroll the answer into view. */
  reveal() {
    this.tokens.card.scrollIntoView({ block: "nearest" });
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.tokens.clear();
    this.#sent = null;
    this.part("seed").textContent = "–";
    this.part("prompt").textContent = "";
    this.part("error").hidden = true;
    this.timings.begin();
    this.timings.show();
  }
}
