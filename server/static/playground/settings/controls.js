// Controls of the settings: an input each, its description, and what is wrong with its value.

import { byId, clone, showError } from "../../common/dom.js";

const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\" };
const numberOf = (input) => input.valueAsNumber;
// The value of a field in a request, by kind of control.
const VALUES = {
  number: numberOf,
  seed: numberOf,
  toggle: () => true,
  json: ({ value }) => parseJson(value),
  lines: ({ value }) => value.split("\n").filter(Boolean).map(unescape),
};
// The fields of a request that constrain the text, by what is chosen.
const CONSTRAINTS = {
  any: () => ({}),
  json_object: () => ({ response_format: { type: "json_object" } }),
  json_schema: (text) => ({
    response_format: {
      type: "json_schema",
      json_schema: { name: "answer", schema: parseJson(text) },
    },
  }),
  regex: (regex) => ({ regex }),
  grammar: (grammar) => ({ grammar }),
};

const unescape = (line) => line.replace(/\\[ntr\\]/g, (pair) => ESCAPES[pair]);

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`invalid JSON: ${error.message}`);
  }
}

/** A control of a field of index.html, with ids that begin with `prefix`. */
export class Control {
  constructor(field, prefix) {
    this.field = field;
    const id = `${prefix}-${field.name}`;
    this.element = clone(
      "control-template",
      {
        name: [{ for: id }, field.label ?? field.name],
        help: [{ id: `${id}-help` }, field.help],
        invalid: [{ id: `${id}-error` }],
      },
      { class: `control ${field.control}` },
    );
    this.error = this.element.querySelector(".error");
    const inputs = byId(`${field.control}-inputs`).content.cloneNode(true);
    this.input = inputs.querySelector(":not([type='range'])");
    this.input.id = id;
    for (const input of inputs.querySelectorAll("input, textarea, select"))
      input.setAttribute("aria-describedby", `${id}-help ${id}-error`);
    this.element.querySelector("label").after(inputs);
    if (field.example) this.input.placeholder = field.example;
    if (this.input.type === "number") this.#limit();
  }

  #limit() {
    const { name, min, max, from, to, step, initial = "" } = this.field;
    const { input } = this;
    Object.assign(input, { min, max, step: step === "1" ? 1 : "any", defaultValue: initial });
    this.slider = this.element.querySelector("[type='range']");
    if (!this.slider) return;
    Object.assign(this.slider, { min: from, max: to, value: initial, ariaLabel: `${name}, slider` });
    const notches = 1 / step;
    this.slider.addEventListener("input", () => {
      input.value = Math.round(this.slider.value * notches) / notches;
    });
    input.addEventListener("input", () => {
      this.slider.value = input.value;
    });
  }

  /** The value to store and compare, null if unchanged. */
  get state() {
    const { type, checked, value, defaultValue } = this.input;
    if (type === "checkbox") return checked || null;
    return value === defaultValue ? null : value;
  }

  restore(kept) {
    const { input, slider } = this;
    if (input.type === "checkbox") input.checked = kept ?? false;
    else input.value = kept ?? input.defaultValue;
    if (!input.checkValidity()) input.value = input.defaultValue; // of a model with other limits
    if (slider) slider.value = input.value;
  }

  /** Return the fields to add to a request. Throws an Error if the value is invalid. */
  fields() {
    const { field, input } = this;
    if (!input.checkValidity()) throw new Error(input.validationMessage);
    const isSent = "always" in field || (this.state !== null && input.value.trim() !== "");
    return isSent ? { [field.name]: VALUES[field.control](input) } : {};
  }

  /** Show what is wrong beside the control, or nothing for "". */
  setError(message) {
    showError(this.error, message);
    for (const one of this.element.querySelectorAll("[aria-invalid]"))
      one.removeAttribute("aria-invalid");
    if (message) this.errorInput.setAttribute("aria-invalid", "true");
  }

  /** The input that an error refers to. */
  get errorInput() {
    return this.input;
  }
}

/** The choice of a constraint, and its rule: a schema, a regex or a grammar. */
export class ConstraintControl extends Control {
  constructor(field, prefix) {
    super(field, prefix);
    this.rule = this.element.querySelector("textarea");
    this.rule.id = `${this.input.id}-rule`;
    this.examples = this.element.querySelector("select:last-of-type");
    this.examples.addEventListener("input", () => {
      this.rule.value = JSON.stringify(JSON.parse(this.examples.value), null, 2);
      this.examples.selectedIndex = 0;
    });
    this.input.addEventListener("input", () => this.#showRule());
  }

  #showRule() {
    this.examples.hidden = this.input.value !== "json_schema";
    this.rule.placeholder = this.input.selectedOptions[0].dataset.example ?? "";
    this.rule.hidden = !this.rule.placeholder;
  }

  get state() {
    return this.input.value === "any" ? null : [this.input.value, this.rule.value];
  }

  restore(kept) {
    // A link has it as JSON.
    const state = typeof kept === "string" ? JSON.parse(kept) : kept;
    [this.input.value, this.rule.value] = state ?? ["any", this.rule.value];
    this.#showRule();
  }

  fields() {
    const { placeholder, value } = this.rule;
    if (placeholder && value.trim() === "")
      throw new Error(`a value is required; example: ${placeholder}`);
    return CONSTRAINTS[this.input.value](value);
  }

  get errorInput() {
    return this.rule.hidden ? this.input : this.rule;
  }
}
