// The settings of one column: its controls, the fields they add to a request, changes, and errors.

import { control } from "./controls.js";
import { make } from "../../common/dom.js";
import { groups } from "./sampling.js";

const CONTROL_OF = { response_format: "form", regex: "form", grammar: "form" };

export class Settings {
  /** Puts the controls into `parent`. Calls `changed` after each change. */
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

  /**
   * Return the fields of a request, or null if a control is invalid. Then it shows why and gets the
   * focus.
   */
  fields() {
    const all = {};
    for (const [name, each] of this.controls) {
      try {
        Object.assign(all, each.fields());
      } catch (error) {
        this.showError(name, error.message);
        return null;
      }
    }
    return all;
  }

  /** Show an error beside the control of an API field. Return false if there is no such control. */
  showError(param, message) {
    const field = param.split(".")[0];
    const found = this.controls.get(CONTROL_OF[field] ?? field);
    if (found === undefined) return false;
    for (let at = found.input.closest("details"); at; at = at.parentElement.closest("details"))
      at.open = true;
    found.setError(message);
    found.errorInput().focus();
    return true;
  }

  /** Return the changed values by control, to store and compare. */
  state() {
    const states = [...this.controls].map(([name, each]) => [name, each.state()]);
    return Object.fromEntries(states.filter(([, state]) => state !== null));
  }

  restore(states = {}) {
    for (const [name, each] of this.controls) each.restore(states[name] ?? null);
    this.#settle();
  }

  /** Increment the seed if one is set. Otherwise each request gets a random one. */
  nextSeed() {
    const { input } = this.controls.get("seed");
    if (input.value) input.value = input.valueAsNumber + 1;
  }

  /** Mark the controls whose values differ from those of `other`; null marks none. */
  markDifferences(other) {
    const otherStates = other?.state();
    const states = this.state();
    for (const [name, each] of this.controls) {
      const differs =
        other !== null && JSON.stringify(states[name]) !== JSON.stringify(otherStates[name]);
      each.element.classList.toggle("differs", differs);
    }
  }

  #settle() {
    for (const each of this.controls.values()) each.setError("");
    for (const { controls, count } of this.groups) {
      const n = controls.filter((each) => each.state() !== null).length;
      if (count) count.textContent = n ? `${n} set` : "";
    }
  }
}
