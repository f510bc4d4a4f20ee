// JSON in the browser's storage. If the browser denies access (private windows, a full quota),
// nothing is stored.

/** Return the value saved under this name, or null, from localStorage or sessionStorage. */
export function load(name, place = "localStorage") {
  try {
    return JSON.parse(window[place].getItem(`kvasir-${name}`));
  } catch {
    return null;
  }
}

/** Save a value under this name. */
export function save(name, value, place = "localStorage") {
  try {
    window[place].setItem(`kvasir-${name}`, JSON.stringify(value));
  } catch {
    // the page works without storage
  }
}
