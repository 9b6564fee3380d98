// Asks the server for the same answer with and without drafts, and shows both while they are written.
"use strict";

const ask = document.getElementById("ask"), said = document.getElementById("said");
const chat = JSON.parse(document.getElementById("data").textContent).chat; // false: prompts are texts to continue
let asking = new AbortController(); // cancels the requests under way

class Side {
  constructor(name) {
    this.section = document.getElementById(name);
    this.text = this.section.querySelector(".answer");
    this.text.replaceChildren();
    Object.assign(this, {tokens: 0, rounds: 0, accepted: 0, drafted: 0, seconds: 0});
  }

  // Tokens/s of the rounds; the prompt and its first token are left out.
  get rate() { return this.seconds ? (this.tokens - 1) / this.seconds : null; }

  take(round) {
    round.tokens.forEach((token, place) => {
      const piece = this.text.appendChild(document.createElement("span"));
      piece.textContent = token;
      if (place < round.accepted) piece.className = "d" + Math.min(4, place + 1);
    });
    this.tokens += round.tokens.length;
    if (round.drafted === null) return;
    this.rounds += 1;
    this.accepted += round.accepted;
    this.drafted += round.drafted;
    this.seconds += round.milliseconds / 1000;
    const tau = this.drafted ? `, tau ${((this.tokens - 1) / this.rounds).toFixed(2)}, ${this.accepted} of ${this.drafted} drafts accepted` : "";
    this.section.querySelector(".figure").textContent = `${this.rate.toFixed(1)} tokens/s, ${this.tokens} tokens in ${this.rounds} rounds${tau}`;
  }
}

// Calls `each` with every document of a stream of server-sent events.
async function read(body, signal, each) {
  const headers = {"Content-Type": "application/json"};
  const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {method: "POST", headers, body: JSON.stringify(body), signal});
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts.map(part => part.replace(/^data: /, ""))) {
      if (part === "[DONE]") continue;
      const document = JSON.parse(part);
      if (document.error) throw new Error(document.error.message);
      each(document);
    }
  }
}

function conclude(drafted, plain, greedy) {
  if (drafted.rate === null || plain.rate === null) return "The answers ended with their first tokens.";
  const same = drafted.text.textContent === plain.text.textContent;
  const equal = !greedy ? "" : same ? " Both answers are the same." : " The answers differ: between logits that are nearly equal, rounding decides.";
  return `${(drafted.rate / plain.rate).toFixed(2)} times as fast with drafts: ${drafted.rate.toFixed(1)} against ${plain.rate.toFixed(1)} tokens/s.${equal}`;
}

ask.addEventListener("submit", async event => {
  event.preventDefault();
  asking.abort();
  const mine = asking = new AbortController();
  const fields = Object.fromEntries(new FormData(ask));
  const body = {...(chat ? {messages: [{role: "user", content: fields.prompt}]} : {prompt: fields.prompt}), stream: true, details: true};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (fields[name] !== "") body[name] = Number(fields[name]);
  const sides = {drafted: new Side("drafted"), plain: new Side("plain")};
  said.textContent = "Both are written, interleaved, a round each ...";
  try {
    await Promise.all(Object.entries(sides).map(([name, side]) => read({...body, speculate: name === "drafted"}, mine.signal, ({round}) => {
      if (round) side.take(round);
    })));
    said.textContent = conclude(sides.drafted, sides.plain, body.temperature === 0);
    said.className = "verdict " + (sides.drafted.rate > sides.plain.rate ? "yes" : "no");
  } catch (error) {
    if (mine !== asking) return;
    said.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    said.className = "verdict no";
    mine.abort();
  }
});
document.getElementById("stop").addEventListener("click", () => asking.abort());
// ?prompt=TEXT&max_tokens=32 fills the fields and asks at once.
const given = new URLSearchParams(location.search);
for (const [name, value] of given) if (ask.elements[name]) ask.elements[name].value = value;
if (given.has("prompt")) ask.requestSubmit();
