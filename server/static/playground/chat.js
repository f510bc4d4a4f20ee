// A conversation: the system message, the turns, which can be edited, and the next message.

import { byId, clone } from "../common/dom.js";
import { callCard } from "./extras.js";

/** Return a stored conversation as messages, without the one that is being written. */
export const asMessages = ({ system, turns }) => [
  ...(system ? [{ role: "system", content: system }] : []),
  ...turns,
];

/** Return the conversation that messages were made of. */
export function asConversation(messages) {
  const { system, turns } = Object.groupBy(messages, ({ role }) =>
    role === "system" ? "system" : "turns",
  );
  return { system: system?.[0].content ?? "", turns: turns ?? [] };
}

/** Return an answer as a turn, and a turn for the result of each call. */
function turnsOf({ content, calls }) {
  const results = calls.map(({ id }) => ({ role: "tool", content: "", tool_call_id: id }));
  const more = calls.length ? { tool_calls: calls } : {};
  return [{ role: "assistant", content, ...more }, ...results];
}

export class Conversation {
  #more = new WeakMap(); // by turn: tool_calls of the assistant's, tool_call_id of a tool's

  /** Calls `changed` after a turn is removed. */
  constructor(changed) {
    this.turns = byId("turns");
    this.changed = changed;
  }

  get isEmpty() {
    return !byId("message").value && this.turns.childElementCount === 0;
  }

  /** Turn the message in the input into a turn of the conversation. */
  commitMessage() {
    if (byId("message").value) this.add({ role: "user", content: byId("message").value });
    byId("message").value = "";
  }

  messages() {
    const { message, ...kept } = this.state();
    return [...asMessages(kept), ...(message ? [{ role: "user", content: message }] : [])];
  }

  /** Add an answer, and a turn for the result of each call. Return the first text area to edit. */
  addAnswer(answer) {
    const [text, result] = turnsOf(answer).map((turn) => this.add(turn));
    return result ?? text;
  }

  /** Add a turn and return the text area in which it can be edited. */
  add({ role, content, ...more }) {
    const id = `turn-${Date.now()}-${this.turns.childElementCount}`;
    const remove = () => {
      turn.remove();
      this.changed();
      byId("message").focus();
    };
    const parts = {
      role: [{ for: id }, role === "tool" ? "result of the tool" : role],
      remove: [{ "aria-label": `Remove this ${role} message`, onclick: remove }],
      content: [{ id }],
    };
    const turn = clone("turn-template", parts, { "data-role": role });
    turn.append(...(more.tool_calls ?? []).map(callCard));
    this.#more.set(turn, more);
    this.turns.append(turn);
    return Object.assign(byId(id), { value: content });
  }

  clear() {
    this.restore({ system: byId("system").value });
  }

  /** Return what to store. `answer` is an answer that is not a turn yet; it is stored as one. */
  state(answer = null) {
    const turns = [...this.turns.children].map((turn) => ({
      role: turn.dataset.role,
      content: turn.querySelector("textarea").value,
      ...this.#more.get(turn),
    }));
    if (answer) turns.push(...turnsOf(answer));
    return { system: byId("system").value, turns, message: byId("message").value };
  }

  restore({ system = "", turns = [], message = "" }) {
    byId("system").value = system;
    byId("message").value = message;
    this.turns.replaceChildren();
    for (const turn of turns) this.add(turn);
  }
}
