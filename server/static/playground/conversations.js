// The conversations that this browser keeps, one of which is shown.

import { download } from "../common/copying.js";
import { asMessages } from "./chat.js";
import { byId, make } from "../common/dom.js";

const LONGEST_TITLE = 40;

export class Conversations {
  #all = [{}];
  #current = 0;

  /**
   * answer() returns the shown answer that is no turn yet, or null. Calls change(action) to choose
   * another conversation once it is kept.
   */
  constructor(conversation, answer, change) {
    this.conversation = conversation;
    this.answer = answer;
    const list = byId("conversation-list");
    list.addEventListener("input", () => {
      const { selectedIndex: chosen } = list; // the list is made anew when the state is stored
      change(() => this.#choose(chosen));
    });
    byId("conversation-new").addEventListener("click", () =>
      change(() => this.#choose(this.#all.push({ system: byId("system").value }) - 1)),
    );
    byId("conversation-delete").addEventListener("click", () =>
      change(() => {
        this.#all.splice(this.#current, 1);
        if (!this.#all.length) this.#all.push({});
        this.#choose(Math.max(0, this.#current - 1));
      }),
    );
    byId("conversation-export").addEventListener("click", () =>
      download("conversation.json", { messages: asMessages(conversation.state(answer())) }),
    );
  }

  /** Return what to store; see Conversation.state. */
  state() {
    this.#all[this.#current] = this.conversation.state(this.answer());
    this.#list();
    return { all: this.#all, current: this.#current };
  }

  restore({ all, current }) {
    this.#all = all;
    this.#choose(current);
  }

  /** Show a conversation beside those that are kept, or in place of itself and an answer. */
  add(conversation) {
    const { length } = conversation.turns;
    const name = ({ system = "", turns = [] }) => JSON.stringify([system, turns.slice(0, length)]);
    const isSame = (one) =>
      name(one) === name(conversation) && !(one.turns?.length > length + 1) && !one.message;
    const known = this.#all.findIndex(isSame);
    const index = known < 0 ? this.#all.length : known;
    this.#all[index] = conversation;
    this.#choose(index);
  }

  #choose(index) {
    this.conversation.restore(this.#all[index]);
    this.#current = index;
    this.#list();
  }

  #list() {
    const options = this.#all.map(({ turns = [], message = "" }, index) => {
      const title = (turns[0]?.content || message || "New conversation").slice(0, LONGEST_TITLE);
      return make("option", { selected: index === this.#current }, title);
    });
    byId("conversation-list").replaceChildren(...options);
  }
}
