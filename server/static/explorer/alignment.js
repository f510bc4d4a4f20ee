// The attention of a target's tokens to its source, as a table whose cells are shaded.

import { byId, make } from "../common/dom.js";
import { revealed } from "../common/token_text.js";
import { formatWeight } from "./weights.js";

const MAX_CELLS = 20_000; // more would stop the page for seconds

/** Show a head's weights, if the model has an encoder; rows are the target's tokens. */
export function showAlignment({ tokens, sourceTokens }, rows) {
  byId("alignment-card").hidden = rows === undefined;
  if (rows === undefined) return;
  const isLarge = tokens.length * sourceTokens.length > MAX_CELLS;
  byId("alignment-large").hidden = !isLarge;
  const columns = sourceTokens.map((token) => named("col", token));
  const shown = isLarge ? [] : rows;
  byId("alignment-head").replaceChildren(make("tr", {}, make("td"), ...(isLarge ? [] : columns)));
  byId("alignment-body").replaceChildren(
    ...shown.map((weights, i) => make("tr", {}, named("row", tokens[i]), ...weights.map(cell))),
  );
}

const named = (scope, token) => make("th", { scope }, ...revealed(token));

const cell = (weight) => make("td", { title: formatWeight(weight), style: { "--weight": weight } });
