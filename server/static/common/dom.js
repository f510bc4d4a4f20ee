// Find and create elements.

/** Return the element with this id. Throws an Error if there is none. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`there is no #${id} on the page`);
  return found;
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

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
