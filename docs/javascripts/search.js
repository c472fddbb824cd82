// The theme's search asks for every word of a question and for whatever begins with it: "a" and "of" match nearly every page, and "batches" misses "batch".
// Here such words, and such endings, are taken out of the question on its way to the search's worker. Without this script the search works, and finds less.
(function () {
  "use strict";
  const QUERY = 2;
  const WORDS = new Set(("a an and are as at be but by can do does for from has have how i if in into is it its me my not of on or our so than that " +
    "the their them then there this to was we were what when where which while why will with").split(" "));
  const ENDING = /(?:ings?|ed|es|(?<![su])s)$/i;

  // The beginning that the forms of a plain word share; at least four letters of it, or the word as it is.
  function beginning(word) {
    const short = word.replace(ENDING, "");
    return /^[a-z]+$/i.test(word) && short.length >= 4 ? short : word;
  }

  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message && message.type === QUERY && typeof message.data === "string") {
      // The number in front of a heading says nothing, and stands in every table.
      const kept = message.data.split(/\s+/).filter((word) => !WORDS.has(word.toLowerCase()) && !/^\d+\.$/.test(word)).map(beginning);
      if (kept.join("")) message = {...message, data: kept.join(" ")};
    }
    return post.call(this, message, ...rest);
  };
})();
