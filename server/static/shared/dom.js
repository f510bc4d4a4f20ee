// Finding and making elements.

/** The element with this id. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`there is no #${id} on the page`);
  return found;
}

/** An element: make("button", { type: "button", class: "primary", onclick: stop }, "Stop"). Texts are never markup. */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
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
