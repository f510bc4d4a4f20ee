// One column: the settings of a request, its streamed answer, and measurements. Comparing takes two
// columns.

import { ApiError, postJson, stream } from "../common/api.js";
import { Branches } from "./branches.js";
import { download } from "../common/copying.js";
import { fromChat, fromCompletion } from "./deltas.js";
import { byId, make, showError } from "../common/dom.js";
import { ReasoningAndCalls } from "./extras.js";
import { linkTo } from "../common/models.js";
import { Placement } from "./placement.js";
import { N_CHOICES } from "./popover.js";
import { Settings } from "./settings/settings.js";
import { Timings } from "./timings.js";
import { revealed } from "../common/token_text.js";
import { TokenText } from "./tokens.js";

const EACH_SECOND = 1000;
const WIDE = "(min-width: 60rem)"; // as in playground.css: settings beside the text, not above it
const STREAMED = {
  return_token_ids: true,
  stream: true,
  stream_options: { include_usage: true, continuous_usage_stats: true },
};

export class Run {
  #abort = null;

  /**
   * Calls changed() after each change of a setting, and onbranch(run, branch) to send a new branch
   * or show one that is known.
   */
  constructor(name, card, changed, onbranch) {
    this.card = card;
    this.element = byId("run-template").content.cloneNode(true).firstElementChild;
    this.element.dataset.run = name;
    for (const title of this.element.querySelectorAll(".of-run"))
      title.append(` ${name.toUpperCase()}`, make("span", { class: "of-model" }, ` · ${card.model}`));
    this.settings = new Settings(this.part("controls"), `setting-${name}`, card, changed);
    this.part("reset").addEventListener("click", () => {
      this.settings.restore();
      changed();
    });
    this.part("settings").open = matchMedia(WIDE).matches;
    this.timings = new Timings(this.part("figures"));
    this.extras = new ReasoningAndCalls(this.part("reasoning"), this.part("calls"));
    this.onbranch = (branch) => onbranch(this, branch);
    this.branches = new Branches(this.part("branches"), this.onbranch);
    this.part("export").addEventListener("click", () =>
      download("branches.json", { model: card.model, branches: this.branches.export() }),
    );
    this.tokens = new TokenText(
      this.part("text"),
      () => this.#measure(),
      (piece) => this.#controls(piece),
    );
  }

  part(name) {
    return this.element.querySelector(`[data-part="${name}"]`);
  }

  get isRunning() {
    return this.#abort !== null;
  }

  get hasAnswer() {
    return this.tokens.text !== "" || this.extras.calls.length > 0;
  }

  get answer() {
    return { content: this.tokens.text, calls: this.extras.calls };
  }

  /** Return { path, body } for { prompt } or { messages }, or null if a setting is invalid. */
  request(input, defaultSeed = null) {
    const fields = this.settings.fields();
    if (fields === null) return null;
    const seed = defaultSeed === null ? {} : { seed: defaultSeed };
    const isChat = "messages" in input;
    if (!isChat) delete fields.tools;
    const scores = isChat ? { logprobs: true, top_logprobs: N_CHOICES } : { logprobs: N_CHOICES };
    const body = { model: this.card.model, ...input, ...seed, ...fields, ...scores, ...STREAMED };
    return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
  }

  /**
   * Send a request and show its answer, then those of the branches on a path. Return how the last
   * one ended, in words. Never throws.
   *
   * The previous request must have ended.
   */
  async send(sent, path = "") {
    this.clear();
    const shown = (sent.body.prompt ?? "") + (this.card.config.encoder === null ? "" : "\n");
    this.tokens.follow(() => this.part("prompt").replaceChildren(...revealed(shown)));
    const settings = this.settings.state();
    this.branches.begin({ sent, settings, promptIds: [], ids: [], pieces: [] }, path);
    let ending = await this.read();
    for (const step of path.split(".").slice(1)) {
      const branch = this.branches.shown.isWhole && this.branches.follow(step);
      if (!branch) break;
      this.show(branch);
      ending = await this.read();
    }
    return ending;
  }

  /** Show a branch. */
  show(branch) {
    this.#reset(branch);
    this.branches.select(branch);
    this.timings = branch.timings ?? this.timings;
    this.part("seed").textContent = branch.sent.body.seed;
    this.tokens.add(branch.pieces);
    this.tokens.draw();
  }

  /** Send the shown branch's request, and show its answer after what the branch keeps. */
  async read() {
    const { shown } = this.branches;
    const { path, body } = shown.sent;
    this.part("seed").textContent = body.seed;
    this.#abort = new AbortController();
    this.element.setAttribute("aria-busy", "true");
    const { signal } = this.#abort;
    const clock = setInterval(() => this.#measure(), EACH_SECOND);
    try {
      const read = "messages" in body ? fromChat : fromCompletion;
      await this.#follow(stream(path, body, signal), read, shown);
    } catch (error) {
      if (signal.aborted) this.timings.end("stopped");
      else this.#fail(error);
    }
    clearInterval(clock);
    this.#abort = null;
    this.element.removeAttribute("aria-busy");
    this.#measure();
    const { pieces } = this.tokens;
    const { reasoning, calls } = this.extras;
    const error = this.part("error").textContent;
    const isWhole = !signal.aborted && !error;
    Object.assign(shown, { pieces, timings: this.timings, reasoning, calls, error, isWhole });
    return this.timings.ending;
  }

  /** Show a stream's events. The ids of its prompt and its tokens go to the branch. */
  async #follow(events, read, branch) {
    const placement = new Placement();
    try {
      for await (const event of events) {
        const delta = read(event);
        this.timings.record(delta);
        if (!branch.promptIds.length) branch.promptIds = delta.promptIds ?? [];
        for (const token of delta.tokens) token.position = branch.ids.push(token.id) - 1;
        const pieces = placement.push(delta.text, delta.tokens);
        if (this.extras.add(delta)) placement.skip();
        this.tokens.add(pieces);
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
    showError(this.part("error"), message + wait);
    if (error.param) this.settings.showError(error.param, error.message);
  }

  /** Return what a pinned token offers: the attention behind it, and a branch for an alternative. */
  #controls(piece) {
    const { has_attention: hasAttention, config, explain_limits: limits } = this.card;
    const isDecoder = config.encoder === null;
    const length = this.branches.shown.promptIds.length + piece.tokens[0].position;
    const canExplain = hasAttention && isDecoder && length <= limits.max_tokens;
    const fork = (token, other) => {
      const branch = isDecoder && !this.isRunning && this.branches.fork(token, other);
      return branch && (() => this.onbranch(branch));
    };
    return { links: canExplain ? [this.#why(piece)] : [], fork };
  }

  /** Return a link to the attention behind a token. It leads there once the prompt is known. */
  #why(piece) {
    const link = make("a", { class: "why" }, "Why this token?");
    const { pieces } = this.tokens;
    const before = pieces.slice(0, pieces.indexOf(piece)).map(({ text }) => text);
    const lead = (prompt) => {
      const state = { prompt: prompt + before.join(""), focused: 1 };
      link.href = linkTo(this.card.model, `#attention?${new URLSearchParams(state)}`);
    };
    this.#prompt().then(lead, (error) => showError(this.part("error"), error.message));
    return link;
  }

  /** Return the text of the prompt; of a conversation, the one that its template makes. */
  async #prompt() {
    const [root] = this.branches.all;
    if ("prompt" in root.sent.body) return root.sent.body.prompt;
    const body = { model: this.card.model, tokens: root.promptIds };
    root.promptText ??= (await postJson("detokenize", body)).prompt;
    return root.promptText;
  }

  /** Mark the settings that differ from another run's, and where the texts of one model part. */
  markDifferences(other) {
    this.settings.markDifferences(other.settings);
    const [own, others] = [this, other].map((run) => run.tokens.pieces);
    const parts = ({ text }, i) => i < others.length && text !== others[i].text;
    this.tokens.mark(this.card.model === other.card.model ? own.findIndex(parts) : -1);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.#reset();
    this.branches.begin();
    this.part("seed").textContent = "–";
    this.part("prompt").textContent = "";
  }

  #reset({ error = "", ...extras } = {}) {
    this.tokens.clear();
    this.extras.show(extras);
    showError(this.part("error"), error);
    this.timings = new Timings(this.part("figures"));
  }
}
