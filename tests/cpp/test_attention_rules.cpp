// Tests of rules of attention that depend on a GPU, on any machine.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "attention/capture_room.h"
#include "attention/packages.h"

namespace {

using cuseq::attention::has_needless_room;
using cuseq::attention::most_head_dim;

TEST(NeedlessRoom, IsTheDefaultRoomOfAnyRow) {
  for (const int64_t tokens : {1, 64, 512, 2048, 32768}) {
    for (const int64_t sequences : {int64_t{0}, int64_t{1}, tokens / 5}) {
      const bool expected = tokens > 4;  // room for 1 to 4 sequences is never too much
      EXPECT_EQ(has_needless_room(tokens, sequences, tokens), expected) << tokens << sequences;
    }
    EXPECT_TRUE(has_needless_room(tokens, std::nullopt, tokens));
    EXPECT_FALSE(has_needless_room(tokens - 1, std::nullopt, tokens));
  }
  EXPECT_FALSE(has_needless_room(0, 0, 0));
  EXPECT_FALSE(has_needless_room(0, std::nullopt, 0));
}

TEST(NeedlessRoom, IsMoreThanRowsCanUse) {
  EXPECT_FALSE(has_needless_room(64, 16, 2048));  // four times the sequences
  EXPECT_TRUE(has_needless_room(65, 16, 2048));
  EXPECT_TRUE(has_needless_room(1024, 7, 2048));
  EXPECT_FALSE(has_needless_room(2048, 2048, 2048));  // documents of one token
}

TEST(NeedlessRoom, IsNoticedBesideTheTilesOfTheRow) {
  EXPECT_FALSE(has_needless_room(64, 1, 8192));  // one document, as many tiles again
  EXPECT_TRUE(has_needless_room(65, 1, 8192));
  EXPECT_FALSE(has_needless_room(128, 8, 32768));
}

TEST(Packages, TakeTheHeadsThatTheirAuthorsPublish) {
  for (const int64_t sm : {90, 100, 103}) {
    EXPECT_EQ(most_head_dim("fa4", sm), sm == 90 ? 256 : 128) << sm;
    EXPECT_EQ(most_head_dim("fa3", sm), 256) << sm;
  }
  EXPECT_EQ(most_head_dim("fa4", 0), 256);  // stand-ins on the CPU
}

}  // namespace
