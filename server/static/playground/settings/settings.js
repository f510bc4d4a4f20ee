// The settings of one column: its controls, the fields they add to a request, changes, and errors.

import { ConstraintControl, Control } from "./controls.js";
import { byId } from "../../common/dom.js";

const CONTROL_OF = { response_format: "form", regex: "form", grammar: "form" };

export class Settings {
  /** Puts the controls into `parent`. Calls `changed` after each change. */
  constructor(parent, prefix, card, changed) {
    this.controls = new Map();
    const fields = byId("settings-template").content.cloneNode(true);
    for (const place of fields.querySelectorAll("[data-control]")) {
      const Kind = place.dataset.control === "form" ? ConstraintControl : Control;
      const made = new Kind(fieldOf(place, card), prefix);
      this.controls.set(place.dataset.name, made);
      place.replaceWith(made.element);
    }
    this.groups = [...fields.querySelectorAll("details")];
    parent.append(fields);
    parent.addEventListener("input", () => {
      this.#settle();
      changed();
    });
  }

  /** Return the fields of a request, or null if a control is invalid: it shows why, focused. */
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

  /** Show an error beside the control of an API field, if there is such a control. */
  showError(param, message) {
    const field = param.split(".")[0];
    const found = this.controls.get(CONTROL_OF[field] ?? field);
    if (found === undefined) return;
    for (let at = found.input.closest("details"); at; at = at.parentElement.closest("details"))
      at.open = true;
    found.setError(message);
    found.errorInput.focus();
  }

  /** Return the changed values by control, to store and compare. */
  state() {
    const states = [...this.controls].map(([name, each]) => [name, each.state]);
    return Object.fromEntries(states.filter(([, state]) => state !== null));
  }

  /** Return the number in a control, also if it is unchanged. */
  value(name) {
    return this.controls.get(name).input.valueAsNumber;
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

  /** Mark the controls whose values differ from those of `other`. */
  markDifferences(other) {
    // Models may recommend different values, to which their controls are set at first.
    const shown = ({ state, input }) => JSON.stringify(state ?? input.defaultValue);
    for (const [name, control] of this.controls) {
      const differs = shown(control) !== shown(other.controls.get(name));
      control.element.classList.toggle("differs", differs);
    }
  }

  #settle() {
    for (const each of this.controls.values()) each.setError("");
    for (const group of this.groups) {
      const own = [...this.controls.values()].filter(({ element }) => group.contains(element));
      const n = own.filter((each) => each.state !== null).length;
      group.querySelector(".count").textContent = n ? `${n} set` : "";
    }
  }
}

/** Read a field of the template, with the model's limits and recommendations. */
function fieldOf({ dataset, textContent }, { generation, max_model_len: most }) {
  const { name } = dataset;
  const limits = Object.entries(dataset).filter(([, value]) => value === "most");
  const field = { ...dataset, ...Object.fromEntries(limits.map(([key]) => [key, most])) };
  const usual = name === "max_tokens" ? Math.min(dataset.initial, most >> 1) : dataset.initial;
  const advice = name in generation ? ` Recommended: ${generation[name]}.` : "";
  const help = textContent.replace(/\s+/g, " ").trim() + advice;
  return { ...field, initial: generation[name] ?? usual, help };
}
