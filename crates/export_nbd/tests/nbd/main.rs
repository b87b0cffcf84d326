//! The server against a client of our own: every style of reply, every request, right and wrong.

mod commit;
mod corpus;
mod departed;
mod durable;
mod handshake;
mod large;
mod load;
mod nospace;
mod requests;
