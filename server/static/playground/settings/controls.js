// Controls of the settings. Each control is an object with:
//
// name, element, input;
// state() and restore(state): the value to store and compare, null if unchanged;
// fields(): the fields to add to a request; throws an Error if the value is invalid;
// setError(message): show what is wrong beside the control, or nothing for "";
// errorInput(): the input that an error refers to.

import { make } from "../../common/dom.js";

const FORMS = {
  any: { label: "any text" },
  json_object: {
    label: "a JSON object",
    fields: () => ({ response_format: { type: "json_object" } }),
  },
  json_schema: {
    label: "JSON matching a schema",
    example: '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
    fields: (text) => ({
      response_format: {
        type: "json_schema",
        json_schema: { name: "answer", schema: parseJson(text) },
      },
    }),
  },
  regex: {
    label: "text matching a regex",
    example: "[0-9]+\\.[0-9]{2}",
    fields: (text) => ({ regex: text }),
  },
  grammar: {
    label: "text of a Lark grammar",
    example: 'start: "yes" | "no"',
    fields: (text) => ({ grammar: text }),
  },
};
const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\" };

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`invalid JSON: ${error.message}`);
  }
}

/** Create the control of a field of sampling.js, with ids that begin with `prefix`. */
export function control(field, prefix) {
  const id = `${prefix}-${field.name}`;
  const made = { number, seed, lines, toggle, form, json }[field.kind](field, id);
  const error = make("p", { class: "error", id: `${id}-error`, hidden: true });
  made.element.append(make("p", { class: "quiet", id: `${id}-help` }, field.help), error);
  const inputs = [made.input, made.rule].filter(Boolean);
  for (const input of inputs) input.setAttribute("aria-describedby", `${id}-help ${id}-error`);
  const errorInput = () => inputs.findLast((input) => !input.hidden);
  const setError = (message) => {
    error.textContent = message;
    error.hidden = message === "";
    for (const input of inputs) input.removeAttribute("aria-invalid");
    if (message) errorInput().setAttribute("aria-invalid", "true");
  };
  return { ...made, name: field.name, errorInput, setError };
}

const row = (field, id, ...inputs) =>
  make(
    "div",
    { class: `control ${field.kind}` },
    make("label", { for: id }, field.label ?? field.name),
    ...inputs,
  );

function check(input) {
  if (!input.checkValidity()) throw new Error(input.validationMessage);
}

function number(field, id) {
  const { min, max, step, initial } = field;
  const isWhole = step === 1;
  const input = make("input", {
    id,
    type: "number",
    min,
    max,
    step: isWhole ? 1 : "any",
    value: initial,
    required: true,
  });
  const [from, to] = field.slider;
  const slider = make("input", {
    type: "range",
    min: from,
    max: to,
    step: "any",
    value: initial,
    "aria-label": `${field.name}, slider`,
  });
  const notches = 1 / step;
  slider.addEventListener("input", () => {
    input.value = Math.round(slider.value * notches) / notches;
  });
  input.addEventListener("input", () => {
    slider.value = input.value;
  });
  const state = () => (input.value === String(initial) ? null : input.value);
  return {
    element: row(field, id, slider, input),
    input,
    state,
    restore: (kept) => {
      input.value = kept ?? initial;
      if (!input.checkValidity()) input.value = initial; // stored for a model with other limits
      slider.value = input.value;
    },
    fields: () => {
      check(input);
      return field.always || state() !== null ? { [field.name]: input.valueAsNumber } : {};
    },
  };
}

function seed(field, id) {
  const input = make("input", {
    id,
    type: "number",
    step: 1,
    min: field.min,
    max: field.max,
    placeholder: "random",
  });
  return optionalControl(field, id, input, () => {
    check(input);
    return input.value ? { seed: input.valueAsNumber } : {};
  });
}

function text(field, id, attributes, fields) {
  const input = make("textarea", { id, rows: 2, spellcheck: "false", ...attributes });
  return optionalControl(field, id, input, () =>
    input.value.trim() === "" ? {} : { [field.name]: fields(input.value) },
  );
}

/** Create a control that is empty at first. It is stored and sent only if it is not empty. */
function optionalControl(field, id, input, fields) {
  return {
    element: row(field, id, input),
    input,
    state: () => input.value || null,
    restore: (kept) => {
      input.value = kept ?? "";
    },
    fields,
  };
}

function lines(field, id) {
  const unescape = (line) => line.replace(/\\[ntr\\]/g, (pair) => ESCAPES[pair]);
  return text(field, id, {}, (value) =>
    value
      .split("\n")
      .filter((line) => line !== "")
      .map(unescape),
  );
}

const json = (field, id) => text(field, id, { placeholder: field.example }, parseJson);

function toggle(field, id) {
  const input = make("input", { id, type: "checkbox" });
  return {
    element: row(field, id, input),
    input,
    state: () => input.checked || null,
    restore: (kept) => {
      input.checked = kept ?? false;
    },
    fields: () => (input.checked ? { [field.name]: true } : {}),
  };
}

function form(field, id) {
  const options = Object.entries(FORMS).map(([value, { label }]) =>
    make("option", { value }, label),
  );
  const input = make("select", { id }, ...options);
  const rule = make("textarea", {
    id: `${id}-rule`,
    rows: 4,
    spellcheck: "false",
    "aria-label": "schema, regex or grammar",
    hidden: true,
  });
  const updateRule = () => {
    rule.placeholder = FORMS[input.value].example ?? "";
    rule.hidden = !rule.placeholder;
  };
  input.addEventListener("input", updateRule);
  return {
    element: row(field, id, input, rule),
    input,
    rule,
    state: () => (input.value === "any" ? null : [input.value, rule.value]),
    restore: (kept) => {
      [input.value, rule.value] = kept ?? ["any", rule.value];
      updateRule();
    },
    fields: () => {
      const { example, fields } = FORMS[input.value];
      if (example && rule.value.trim() === "")
        throw new Error(`a value is required; example: ${example}`);
      return fields?.(rule.value) ?? {};
    },
  };
}
