// Pointer and keyboard input of the heat map: read a weight, pin a row.

const MOVES = {
  ArrowUp: ({ query, key }) => [query - 1, key],
  ArrowDown: ({ query, key }) => [query + 1, key],
  ArrowLeft: ({ query, key }) => [query, key - 1],
  ArrowRight: ({ query, key }) => [query, key + 1],
  PageUp: ({ query, key }) => [query - 10, key],
  PageDown: ({ query, key }) => [query + 10, key],
  Home: ({ query }) => [query, 0],
  End: ({ query }) => [query, query],
};

/** Call point(cell or null, byKeyboard) and pin(query). A query or key of -1 is on the labels. */
export function listen(map, point, pin) {
  const { scroller } = map;
  const under = (event) => {
    const box = map.canvas.getBoundingClientRect();
    return map.cellAt(event.clientX - box.left, event.clientY - box.top);
  };
  scroller.addEventListener("pointermove", (event) => point(under(event), false));
  scroller.addEventListener("pointerleave", () => point(null, false));
  scroller.addEventListener("blur", () => {
    map.cursor = null;
    point(null, false);
  });
  scroller.addEventListener("click", (event) => {
    const cell = under(event);
    map.cursor = cell && cell.query >= 0 && cell.key >= 0 ? cell : null;
    if (cell && cell.query >= 0) pin(cell.query);
    point(cell, false);
  });
  scroller.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") pin(map.cursor?.query ?? map.marks.pinned);
    else if (event.key in MOVES) point(moveCursor(map, event.key), true);
    else return;
    event.preventDefault();
  });
}

/**
 * Move the keyboard's cell and return it. The first key press selects the pinned token's own cell.
 */
function moveCursor(map, name) {
  const { pinned } = map.marks;
  const [query, key] = map.cursor ? MOVES[name](map.cursor) : [pinned, pinned];
  const within = (index) => Math.min(map.n - 1, Math.max(0, index));
  map.cursor = { query: within(query), key: within(key) };
  map.reveal(map.cursor.query, map.cursor.key);
  return map.cursor;
}
