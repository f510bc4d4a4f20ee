// The likeliest next tokens as bars. Each bar is a button that appends its token.

import { byId, clone } from "../common/dom.js";
import { formatShare } from "../common/format.js";
import { visible } from "../common/token_text.js";

/** Show the distribution and the rest. Reuse the buttons, so the keyboard focus stays. */
export function showNextTokens(nextTokens, onchoose) {
  const list = byId("next-tokens");
  nextTokens.forEach((token, i) => {
    const isPart = /^bytes:.*\\x[0-9a-f]{2}/.test(token.text); // of a character, so no text alone
    const button = (list.children[i] ?? list.appendChild(clone("next-token"))).firstElementChild;
    const [text, share, bar] = button.children;
    text.textContent = visible(token.text);
    share.textContent = formatShare(token.probability);
    bar.style.width = `${100 * token.probability}%`;
    button.title = `token ${token.token_id}, probability ${token.probability}`;
    if (isPart) button.title += "; it is part of a character and cannot be appended alone";
    button.setAttribute("aria-disabled", isPart);
    button.onclick = () => isPart || onchoose(token);
  });
  while (list.children.length > nextTokens.length) list.lastElementChild.remove();
  const shown = nextTokens.reduce((sum, token) => sum + token.probability, 0);
  byId("next-rest").textContent = formatShare(Math.max(0, 1 - shown));
}
