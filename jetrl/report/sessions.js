// ---- the page of a server's sessions --------------------------------------------------------------------------------
traces();
document.documentElement.dataset.drawn = "true";
