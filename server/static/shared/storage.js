// What the browser keeps for this page, as JSON. It may refuse (private windows, a full quota): nothing is kept then.

/** What was saved under this name, or null. `place` is localStorage or, for this tab alone, "sessionStorage". */
export function load(name, place = "localStorage") {
  try {
    return JSON.parse(window[place].getItem(`kvasir-${name}`));
  } catch {
    return null;
  }
}

export function save(name, value, place = "localStorage") {
  try {
    window[place].setItem(`kvasir-${name}`, JSON.stringify(value));
  } catch {
    // the page works without
  }
}
