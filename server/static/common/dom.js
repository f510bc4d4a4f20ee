// Find, create and fill elements.

import { formatCount } from "./format.js";

/** Return the element with this id. Throws an Error if there is none. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`there is no #${id} on the page`);
  return found;
}

/**
 * Show what is wrong in an element, and bring it into sight; "" hides it. Screen readers announce
 * each change of its text, so the same text is not repeated.
 */
export function showError(element, message) {
  const isNew = message !== "" && (element.hidden || element.textContent !== message);
  element.hidden = message === "";
  if (element.textContent !== message) element.textContent = message;
  if (isNew) element.scrollIntoView({ block: "nearest" });
}

/**
 * Create an element: make("button", { type: "button", class: "primary", onclick: stop }, "Stop").
 *
 * Text children are never parsed as markup.
 */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element, as make() does. */
export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/**
 * Copy the element of a <template>, and fill each of its parts, the elements with that data-part,
 * with a text or with what make() takes after the tag: clone("row", { name: "X", size: [{ title },
 * "4 KiB"] }). `attributes` are the element's own.
 */
export function clone(id, parts = {}, attributes = {}) {
  const copy = fill(byId(id).content.firstElementChild.cloneNode(true), attributes, []);
  for (const [name, value] of Object.entries(parts)) {
    const [ofPart, ...children] = Array.isArray(value) ? value : [{}, value];
    fill(copy.querySelector(`[data-part="${name}"]`), ofPart, children);
  }
  return copy;
}

/** Set attributes, listeners (onclick) and properties of the style ({ style: { width } }). */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    // The page's policy forbids style attributes.
    else if (name === "style")
      Object.entries(value).forEach(([property, text]) =>
        element.style.setProperty(property, text),
      );
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/**
 * Fill in the texts of an element. Those with data-fact get the fact of that name; those with
 * data-if are shown where what they name holds: "causal", "!causal", "position=rotary", or several
 * of these, separated by spaces, together.
 */
export function present(element, facts) {
  const holds = (condition) => {
    const [, not, name, value] = /^(!?)(\w+)(?:=(.*))?$/.exec(condition);
    const is = value === undefined ? Boolean(facts[name]) : facts[name] === value;
    return is !== Boolean(not);
  };
  for (const one of element.querySelectorAll("[data-fact]")) {
    const fact = facts[one.dataset.fact];
    one.textContent = typeof fact === "number" ? formatCount(fact) : fact;
  }
  for (const one of element.querySelectorAll("[data-if]"))
    one.toggleAttribute("hidden", !one.dataset.if.split(" ").every(holds));
}
