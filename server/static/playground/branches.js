// The branches of an answer: texts that go on from an alternative of one of its tokens, as a tree.

import { N_CHOICES } from "./popover.js";
import { clone, make } from "../common/dom.js";
import { quoted, visible } from "../common/token_text.js";

// A grammar begins where the answer does, so no branch can follow one.
const RULES = ["response_format", "regex", "grammar", "tools"];

/**
 * A branch is { sent, promptIds, ids, pieces, reasoning, calls, error, isWhole, timings, path } and,
 * but for the root, { parent, position, name, title }: the request and its answer, the tokens of
 * prompt and text by id, the positions and ids of the tokens that were taken (".5-1234.20-99"), and
 * what tells the branch from its parent, at a position in its text.
 */
export class Branches {
  all = [];
  shown = null;
  path = ""; // to the shown branch, or to the one that is to follow

  /** Shows the tree in `element` if there is more than one branch. Calls onselect(branch). */
  constructor(element, onselect) {
    this.element = element;
    this.onselect = onselect;
  }

  /** Begin anew with an answer, the root, or with none. `path`: of the branch that is to follow. */
  begin(root = null, path = "") {
    this.all = root ? [{ ...root, parent: null, path: "", name: "first answer" }] : [];
    this.select(root && this.all[0]);
    this.path = path;
  }

  /** Return the branch of the shown one to which a step of a path leads; null if there is none. */
  follow(step) {
    const [place, id] = step.split("-").map(Number);
    const tokens = this.shown.pieces.flatMap((piece) => piece.tokens);
    const token = tokens.find(({ position }) => position === place);
    const alternative = token?.top.find((one) => one.id === id);
    return alternative ? this.fork(token, alternative) : null;
  }

  /** Return a branch of the shown one, with an alternative in a token's place; null if none can be. */
  fork({ position, name, top }, alternative) {
    const { sent, promptIds, ids, pieces, reasoning } = this.shown;
    const { messages, top_logprobs: _, ...fields } = sent.body;
    const canFollow = alternative.text && alternative.id !== undefined;
    if (!canFollow || !promptIds.length || RULES.some((rule) => rule in fields)) return null;
    const at = pieces.findIndex(({ tokens }) => tokens.some((one) => one.position === position));
    const first = { text: alternative.text, tokens: [{ ...alternative, top, position }] };
    const given = [...ids.slice(0, position), alternative.id];
    const body = {
      ...fields,
      prompt: [...promptIds, ...given],
      max_tokens: Math.max(1, this.all[0].sent.body.max_tokens - given.length),
      logprobs: N_CHOICES,
    };
    const title = `${quoted(alternative.name)} in place of ${quoted(name)}, token ${position + 1}`;
    return {
      parent: this.shown,
      position,
      path: `${this.shown.path}.${position}-${alternative.id}`,
      name: visible(alternative.name),
      title,
      sent: { path: "v1/completions", body },
      promptIds,
      ids: given,
      pieces: [...pieces.slice(0, at), first],
      reasoning,
    };
  }

  select(branch) {
    if (branch && !this.all.includes(branch)) this.all.push(branch);
    this.shown = branch;
    this.path = branch?.path ?? "";
    this.element.hidden = this.all.length < 2;
    const hadFocus = this.element.contains(document.activeElement);
    this.element.querySelector("ul").replaceWith(this.#list(null));
    if (hadFocus) this.element.querySelector("[aria-current]")?.focus();
  }

  /** Return all branches as plain objects, each with the number of its parent. */
  export() {
    return this.all.map(({ parent, position, title, sent, promptIds, ids, pieces }) => ({
      parent: parent && this.all.indexOf(parent),
      position,
      title,
      text: pieces.map((piece) => piece.text).join(""),
      prompt_token_ids: promptIds,
      token_ids: ids,
      request: sent,
      tokens: pieces.flatMap((piece) => piece.tokens),
    }));
  }

  #list(parent) {
    const children = this.all.filter((branch) => branch.parent === parent);
    return make("ul", {}, ...children.map((branch) => this.#item(branch)));
  }

  #item(branch) {
    const { name, title } = branch;
    const current = branch === this.shown && "true";
    const select = [{ title, "aria-current": current, onclick: () => this.onselect(branch) }];
    const item = clone("branch-template", { name, select });
    const list = this.#list(branch);
    if (list.hasChildNodes()) item.append(list);
    return item;
  }
}
