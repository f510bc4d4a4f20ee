// One column's settings: all controls, what they add to a request, what was changed, and what is wrong.

import { control } from "./controls.js";
import { make } from "../../shared/dom.js";
import { groups } from "./sampling.js";

const CONTROL_OF = { response_format: "form", regex: "form", grammar: "form" };

export class Settings {
  /** Puts the controls into `parent`. `changed` is called after every change. */
  constructor(parent, prefix, card, changed) {
    this.controls = new Map();
    this.groups = groups(card).map(({ title, fields }) =>
      this.#group(parent, prefix, title, fields),
    );
    parent.addEventListener("input", () => {
      this.#settle();
      changed();
    });
  }

  #group(parent, prefix, title, fields) {
    const controls = fields.map((field) => control(field, prefix));
    for (const each of controls) this.controls.set(each.name, each);
    const elements = controls.map((each) => each.element);
    if (title === undefined) {
      parent.append(...elements);
      return { controls };
    }
    const count = make("span", { class: "count" });
    parent.append(make("details", {}, make("summary", {}, title, " ", count), ...elements));
    return { controls, count };
  }

  /** The fields of a request; null where a control is wrong, which then says so and has the focus. */
  fields() {
    const all = {};
    for (const [name, each] of this.controls) {
      try {
        Object.assign(all, each.fields());
      } catch (error) {
        this.mark(name, error.message);
        return null;
      }
    }
    return all;
  }

  /** Say beside the control of an API's field what is wrong with it. False where there is no such control. */
  mark(param, message) {
    const field = param.split(".")[0];
    const found = this.controls.get(CONTROL_OF[field] ?? field);
    if (found === undefined) return false;
    for (let at = found.input.closest("details"); at; at = at.parentElement.closest("details"))
      at.open = true;
    found.tell(message);
    found.blamed().focus();
    return true;
  }

  /** What was changed, by control: for keeping and comparing. */
  state() {
    const states = [...this.controls].map(([name, each]) => [name, each.state()]);
    return Object.fromEntries(states.filter(([, state]) => state !== null));
  }

  restore(states = {}) {
    for (const [name, each] of this.controls) each.restore(states[name] ?? null);
    this.#settle();
  }

  /** Another seed where one is set; where none is, each request gets its own. */
  nextSeed() {
    const { input } = this.controls.get("seed");
    if (input.value) input.value = input.valueAsNumber + 1;
  }

  /** Mark the controls that are set otherwise than those of `other`; null is none. */
  markDifferences(other) {
    const theirs = other?.state();
    const own = this.state();
    for (const [name, each] of this.controls) {
      const differs = other !== null && JSON.stringify(own[name]) !== JSON.stringify(theirs[name]);
      each.element.classList.toggle("differs", differs);
    }
  }

  #settle() {
    for (const each of this.controls.values()) each.tell("");
    for (const { controls, count } of this.groups) {
      const n = controls.filter((each) => each.state() !== null).length;
      if (count) count.textContent = n ? `${n} set` : "";
    }
  }
}
