"""Recurrent models that guess the next character of a text."""

from __future__ import annotations

from torch import Tensor, nn


class NextCharacter(nn.Module):
    """An embedding, a recurrent net, and scores from its last state."""

    def __init__(self, vocab: int, embed: int, rnn: nn.GRU | nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, embed)
        self.rnn = rnn
        self.head = nn.Linear(rnn.hidden_size, vocab)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(text))
        scores: Tensor = self.head(states[:, -1])
        return scores


def gru_char(vocab: int = 80, embed: int = 8, hidden: int = 128, layers: int = 2) -> nn.Module:
    """FedGBO's Shakespeare GRU (Table 7); FedAdaVR's has `layers=1`."""
    return NextCharacter(vocab, embed, nn.GRU(embed, hidden, layers, batch_first=True))


def lstm_char(vocab: int = 80, embed: int = 8, hidden: int = 256, layers: int = 2) -> nn.Module:
    """LEAF's Shakespeare LSTM."""
    return NextCharacter(vocab, embed, nn.LSTM(embed, hidden, layers, batch_first=True))
