"use strict";
gallery.notes();
addEventListener("hashchange", gallery.show);
gallery.show();
