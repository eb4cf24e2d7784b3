// Text to ids, cut to the model's length exactly as transformers does it (truncation=True).
import { Tokenizer } from "./vendor/tokenizers.js";

export class Encoder {
  constructor(tokenizer, config, longest) {
    this.tokenizer = new Tokenizer(tokenizer, config);
    this.longest = longest;
    this.added = new Map([...this.tokenizer.get_added_tokens_decoder()].map(([id, token]) => [token.content, id]));
  }

  // One text, or two if the model reads pairs. `total` is the number of tokens before the cut.
  encode(text, pair = null) {
    const first = this.#tokens(text);
    const second = pair === null ? null : this.#tokens(pair);
    const special = this.#joined([], pair === null ? null : []).tokens.length;
    const [a, b] = cut(first, second, Math.max(this.longest - special, 0));
    const { tokens, types } = this.#joined(a, b);
    return { tokens, types, ids: tokens.map((token) => this.#id(token)), total: first.length + (second?.length ?? 0) + special };
  }

  #tokens(text) {
    return this.tokenizer.tokenize(text, { add_special_tokens: false }) ?? [];
  }

  #joined(first, second) {
    const joined = this.tokenizer.post_processor?.(first, second, true) ?? { tokens: [...first, ...(second ?? [])] };
    return { tokens: joined.tokens, types: joined.token_type_ids ?? joined.tokens.map(() => 0) };
  }

  #id(token) {
    const model = this.tokenizer.model;
    return this.added.get(token) ?? model.tokens_to_ids.get(token) ?? model.unk_token_id;
  }
}

// Of a pair the longer text is cut first; if both are too long, each gets half.
export function cut(first, second, room) {
  if (second === null) return [first.slice(0, room), null];
  let [short, long] = [first.length, second.length].sort((a, b) => a - b);
  long = short > room ? short : Math.max(short, room - short);
  if (short + long > room) [short, long] = [Math.floor(room / 2), Math.floor(room / 2) + (room % 2)];
  return first.length > second.length ? [first.slice(0, long), second.slice(0, short)] : [first.slice(0, short), second.slice(0, long)];
}
