// A conversation: the system message, the turns, which can be edited, and the next message.

import { byId, make } from "../common/dom.js";

export class Conversation {
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
    if (byId("message").value) this.add("user", byId("message").value);
    byId("message").value = "";
  }

  messages() {
    const { system, turns, message } = this.state();
    const given = system ? [{ role: "system", content: system }] : [];
    return [...given, ...turns, ...(message ? [{ role: "user", content: message }] : [])];
  }

  /** Add a turn and return the text area in which it can be edited. */
  add(role, content) {
    const id = `turn-${Date.now()}-${this.turns.childElementCount}`;
    const text = make("textarea", { id, rows: 1, dir: "auto" });
    text.value = content;
    const remove = make(
      "button",
      { type: "button", "aria-label": `Remove this ${role} message` },
      "Remove",
    );
    const turn = make("li", { "data-role": role }, make("label", { for: id }, role), remove, text);
    remove.addEventListener("click", () => {
      turn.remove();
      this.changed();
      byId("message").focus();
    });
    this.turns.append(turn);
    return text;
  }

  clear() {
    this.restore({ system: byId("system").value });
  }

  /** Return what to store. `answer` is an answer that is not a turn yet; it is stored as one. */
  state(answer = "") {
    const turns = [...this.turns.children].map((turn) => ({
      role: turn.dataset.role,
      content: turn.querySelector("textarea").value,
    }));
    if (answer) turns.push({ role: "assistant", content: answer });
    return { system: byId("system").value, turns, message: byId("message").value };
  }

  restore({ system = "", turns = [], message = "" }) {
    byId("system").value = system;
    byId("message").value = message;
    this.turns.replaceChildren();
    for (const { role, content } of turns) this.add(role, content);
  }
}
