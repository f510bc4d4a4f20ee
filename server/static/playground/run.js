// One column: a request's settings, its answer as it comes, and what was measured. There are two of them to compare.

import { ApiError, stream } from "../shared/api.js";
import { ofChat, ofCompletion } from "./deltas.js";
import { byId } from "../shared/dom.js";
import { Placement } from "./placement.js";
import { N_CHOICES } from "./popover.js";
import { Settings } from "./settings/settings.js";
import { Timings } from "./timings.js";
import { revealed } from "../shared/token_text.js";
import { TokenText } from "./tokens.js";

const EACH_SECOND = 1000;
const WIDE = "(min-width: 60rem)"; // as in playground.css: where settings do not stand before the text
const STREAMED = {
  stream: true,
  stream_options: { include_usage: true, continuous_usage_stats: true },
};

export class Run {
  #abort = null;
  #sent = null; // the request whose answer is shown

  /** `changed` is called when a setting was. */
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

  /** The path and the body of a request for `input`: { prompt } or { messages }. Null where a setting is wrong. */
  request(input, drawnSeed = null) {
    const fields = this.settings.fields();
    if (fields === null) return null;
    const seed = drawnSeed === null ? {} : { seed: drawnSeed };
    const isChat = "messages" in input;
    const scores = isChat ? { logprobs: true, top_logprobs: N_CHOICES } : { logprobs: N_CHOICES };
    const body = { model: this.card.model, ...input, ...seed, ...fields, ...scores, ...STREAMED };
    return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
  }

  /** Send a request, not before another has ended, and show its answer. Returns in words how it ended; never throws. */
  async send({ path, body }) {
    this.clear();
    this.#sent = { path, body };
    this.part("seed").textContent = body.seed;
    this.tokens.follow(() => this.part("prompt").replaceChildren(...revealed(body.prompt ?? "")));
    this.#abort = new AbortController();
    this.element.setAttribute("aria-busy", "true");
    const { signal } = this.#abort;
    const clock = setInterval(() => this.#measure(), EACH_SECOND);
    try {
      await this.#show(stream(path, body, signal), "messages" in body ? ofChat : ofCompletion);
    } catch (error) {
      if (signal.aborted) this.timings.ended("stopped");
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
        this.timings.came(delta);
        this.tokens.add(placement.push(delta.text, delta.tokens));
      }
    } finally {
      this.tokens.add(placement.flush()); // of a stream that broke off, too
      this.tokens.draw();
    }
  }

  #measure() {
    const seconds = this.isRunning ? this.timings.waited : null;
    const what = seconds ? `waiting for the first token… ${seconds} s` : "";
    this.tokens.follow(() => {
      this.timings.show();
      this.part("waiting").replaceChildren(what);
    });
  }

  #fail(error) {
    this.timings.ended(error.status ? "refused" : "failed");
    const isKnown = error instanceof ApiError;
    if (!isKnown) console.error(error);
    const message = isKnown ? error.message : `the answer cannot be read: ${error.message}`;
    const wait = error.retryAfter ? ` · retry in ${error.retryAfter} s` : "";
    this.part("error").textContent = message + wait;
    this.tokens.follow(() => {
      this.part("error").hidden = false;
    });
    if (error.param) this.settings.mark(error.param, error.message);
  }

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
