// The lab: heads that are switched off, what that does to the next token, and what each layer says.

import { byId, clone, make } from "../common/dom.js";
import { formatShare } from "../common/format.js";
import { quoted, visible } from "../common/token_text.js";

/** Show which heads are off, with a button for each that calls onchange(names). */
export function showSwitches(without, { layer, head }, onchange) {
  const name = `${layer}.${head}`;
  const isOff = without.includes(name);
  const others = without.filter((one) => one !== name);
  byId("switch").textContent = `Switch layer ${layer}, head ${head} ${isOff ? "on" : "off"}`;
  byId("switch").onclick = () => onchange(isOff ? others : [...without, name]);
  byId("all-on").hidden = without.length < 2;
  byId("all-on").onclick = () => onchange([]);
  byId("switched").textContent = without.length
    ? `Off, by layer and head: ${without.join(", ")}`
    : "All heads are on.";
}

/** Show what a response says about the pinned row, with older parts left out if it has none. */
export function showRowAnswers({ effect, lens }, token) {
  byId("effect").hidden = !effect;
  if (effect) showEffect(effect, token);
  byId("lens-caption").textContent = `After ${quoted(token)}, at the output of each layer`;
  const rows = lens.map(({ layer, next_tokens: tokens }) => {
    const cells = tokens.map(({ text, probability }) =>
      clone("lens-token", { token: visible(text), share: formatShare(probability) }),
    );
    return make("tr", {}, make("th", { scope: "row", class: "number" }, `${layer}`), ...cells);
  });
  byId("lens").replaceChildren(...rows);
}

function showEffect({ kl_divergence: bits, tokens }, token) {
  byId("effect-caption").textContent =
    `After ${quoted(token)}: ${bits.toFixed(3)} bits (KL divergence) from the whole model`;
  const rows = tokens
    .toSorted((a, b) => b.whole_probability - a.whole_probability)
    .map((one) => {
      const change = one.logit - one.whole_logit;
      return clone("effect-row", {
        token: visible(one.text),
        whole: formatShare(one.whole_probability),
        without: formatShare(one.probability),
        change: `${change < 0 ? "−" : "+"}${Math.abs(change).toFixed(2)}`,
      });
    });
  byId("effect-body").replaceChildren(...rows);
}
