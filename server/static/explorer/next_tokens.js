// What may come next, likeliest first, as bars; each is a button that lets it come.

import { make } from "../shared/dom.js";
import { formatShare } from "../shared/format.js";
import { visible } from "../shared/token_text.js";

const isPart = (token) => /^bytes:.*\\x[0-9a-f]{2}/.test(token.text); // of a character, so it makes no text alone

/** Show the distribution, and what is left for all others. Buttons stay where they are: the keyboard can go on. */
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
    if (isPart(token)) button.title += "; a part of a character cannot be appended";
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
