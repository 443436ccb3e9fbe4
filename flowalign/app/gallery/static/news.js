"use strict";
// A page of a run that goes on learns of every evaluation and of new samples: Curves show them, other views offer them.
(() => {
  const { element } = gallery, main = document.getElementById("main"), news = document.getElementById("news");

  gallery.reached = (far) => {
    // Vote has a line of its own
    if (far === gallery.data.reached || news.firstChild || main.className === "vote") return;
    // which a run that has just begun has not got yet
    if (location.hash.startsWith("#curves")) return location.reload();
    news.append(element("p", { class: "hint" }, "The run has gone on. ", element("button", { type: "button", onclick: () => location.reload() }, "Show what is new")));
  };

  const watch = setInterval(() => {
    if (document.hidden) return;
    const script = element("script", { src: "assets/newest.js?" + Date.now(), onload: () => script.remove(), onerror: () => clearInterval(watch) });
    document.head.append(script);
  }, 5000);
})();
