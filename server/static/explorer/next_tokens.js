// The likeliest next tokens as bars. Each bar is a button that appends its token.

import { make } from "../common/dom.js";
import { formatShare } from "../common/format.js";
import { visible } from "../common/token_text.js";

/** Return whether a token is part of a character, which is no text on its own. */
const isPart = (token) => /^bytes:.*\\x[0-9a-f]{2}/.test(token.text);

/** Show the distribution and the rest. Reuse the buttons, so the keyboard focus stays. */
export function showNextTokens(list, rest, nextTokens, onchoose) {
  nextTokens.forEach((token, i) => {
    const button =
      list.children[i]?.firstElementChild ??
      list.appendChild(make("li", {}, entry())).firstElementChild;
    const [text, share, bar] = button.children;
    text.textContent = visible(token.text);
    share.textContent = formatShare(token.probability);
    bar.style.width = `${100 * token.probability}%`;
    button.title = `token ${token.token_id}, probability ${token.probability}`;
    if (isPart(token)) button.title += "; it is part of a character and cannot be appended alone";
    button.setAttribute("aria-disabled", isPart(token));
    button.onclick = () => isPart(token) || onchoose(token);
  });
  while (list.children.length > nextTokens.length) list.lastElementChild.remove();
  rest.textContent = formatShare(
    Math.max(0, 1 - nextTokens.reduce((sum, token) => sum + token.probability, 0)),
  );
}

function entry() {
  return make(
    "button",
    { type: "button", class: "next-token" },
    make("span", { class: "next-text" }),
    make("span", { class: "next-share" }),
    make("span", { class: "next-bar" }),
  );
}
