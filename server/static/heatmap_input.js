// What pointer and keyboard do on the large map: read a weight, pin a row.

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

/** Calls point(cell or null, byKeyboard) and pin(query). A query or key is -1 where the pointer is on the labels. */
export function listen(map, point, pin) {
  const { scroller } = map;
  const under = (event) => {
    const box = map.canvas.getBoundingClientRect();
    return map.cellAt(event.clientX - box.left, event.clientY - box.top);
  };
  scroller.addEventListener("pointermove", (event) => point(under(event), false));
  scroller.addEventListener("pointerleave", () => point(null, false));
  scroller.addEventListener("blur", () => point(null, false));
  scroller.addEventListener("click", (event) => {
    const cell = under(event);
    if (cell && cell.query >= 0) pin(cell.query);
    point(cell, false);
  });
  scroller.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") pin(start(map).query);
    else if (event.key in MOVES) point(moved(map, event.key), true);
    else return;
    event.preventDefault();
  });
}

/** The cell from which the keyboard goes on. */
function start({ marks: { point, pinned } }) {
  const within = (index) => (index >= 0 ? index : pinned);
  return { query: within(point?.query), key: within(point?.key) };
}

/** Where a key leads. The first press shows where the keyboard is. */
function moved(map, name) {
  const from = start(map);
  const [query, key] = map.marks.point ? MOVES[name](from) : [from.query, from.key];
  const within = (index) => Math.min(map.n - 1, Math.max(0, index));
  const cell = { query: within(query), key: within(key) };
  map.reveal(cell);
  return cell;
}
